"""Sessions without shared memory: the same API, and nothing on the machine."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shmlane import (
    InferFailed,
    RequestLost,
    Session,
    TensorMismatch,
    Timeouts,
)
from shmlane.server import TritonServer
from tests.fault_proxy import FaultProxy, How
from tests.patience import given_up
from tests.sessions import (
    Array,
    all_free,
    fill,
    frame,
    own_region_files,
    registered,
    sink,
    stopped,
)
from tests.tensor_values import assert_same, tensor

pytestmark = pytest.mark.usefixtures("no_leftovers")

LARGE = (3, 500, 701)

IN_A_PRIVATE_SHM = """
import sys, warnings
import numpy as np
import shmlane
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        with shmlane.Session(sys.argv[1], "echo_fp32", memory="auto") as session:
            for value in range(5):
                sent = np.full((1, 2, 3), value, np.float32)
                assert (session.infer({"INPUT__0": sent})["OUTPUT__0"] == value).all()
            print(session.stats().registrations, session.stats().shared_bytes)
for each in caught:
    print(each.category.__name__, each.message)
"""


def echo(session: Session, sent: Array) -> Array:
    return session.infer({"INPUT__0": sent})["OUTPUT__0"]


def test_no_memory_is_shared_and_nothing_is_registered(
    tensors_server: TritonServer,
) -> None:
    files, regions = own_region_files(), registered(tensors_server)
    with Session(tensors_server.http_url, "echo_fp32", memory="wire") as session:
        sent = tensor("FP32", LARGE)
        assert_same(echo(session, sent), sent)
        assert own_region_files() == files
        assert registered(tensors_server) == regions
        stats = all_free(session)
        assert stats.registrations == stats.shared_bytes == 0
        assert stats.connections >= 1


def test_memory_auto_shares_memory_where_the_server_sees_it(
    tensors_server: TritonServer,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Session(tensors_server.http_url, "echo_fp32", memory="auto") as session:
            sent = tensor("FP32", LARGE)
            assert_same(echo(session, sent), sent)
            assert session.stats().registrations > 0


def test_memory_auto_takes_the_wire_where_the_server_sees_no_memory_of_ours(
    tensors_server: TritonServer,
) -> None:
    mount = "mount -t tmpfs -o size=16m,mode=1777 tmpfs /dev/shm"
    ended = subprocess.run(
        [
            *("unshare", "-m", "--propagation", "private"),
            *("sh", "-c", f'{mount} && exec "$0" "$@"'),
            *(sys.executable, "-c", IN_A_PRIVATE_SHM, tensors_server.http_url),
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if "unshare" in ended.stderr or "mount:" in ended.stderr:
        pytest.skip(f"a private /dev/shm is not permitted here: {ended.stderr.strip()}")
    assert ended.returncode == 0, ended.stderr
    first, second, *told = ended.stdout.splitlines()
    assert first == second == "0 0"
    # Once for each session, with the reason.
    assert len(told) == 2
    for warning in told:
        assert "over the wire" in warning
        assert "cannot open /dev/shm/shmlane." in warning


def test_inputs_go_from_where_they_lie_and_are_not_changed(
    tensors_server: TritonServer,
) -> None:
    sent = tensor("UINT8", LARGE).copy()
    sent.flags.writeable = False
    with Session(tensors_server.http_url, "echo_uint8", memory="wire") as session:
        for layout in (sent, sent[::-1, ::2], sent.transpose(), sent[:0]):
            assert_same(echo(session, layout), np.ascontiguousarray(layout))
    assert_same(sent, tensor("UINT8", LARGE))


def test_a_second_request_of_a_lease_sends_what_its_views_hold_then(
    tensors_server: TritonServer,
) -> None:
    with (
        Session(tensors_server.http_url, "echo_int32", memory="wire") as session,
        session.lease() as lease,
    ):
        view = lease.view("INPUT__0", (1, 2, 3))
        for value in (4, 5):
            view[...] = value
            assert (lease.infer()["OUTPUT__0"] == value).all()
        del view


def test_what_a_lease_wrote_does_not_change_with_its_source(
    tensors_server: TritonServer,
) -> None:
    source = np.full((1, 1, 5), 3, np.int32)
    with (
        Session(tensors_server.http_url, "echo_int32", memory="wire") as session,
        session.lease() as lease,
    ):
        lease.write("INPUT__0", source)
        source[...] = 4
        assert (lease.infer()["OUTPUT__0"] == 3).all()


def test_kept_results_are_never_written_by_later_requests(
    tensors_server: TritonServer,
) -> None:
    with Session(
        tensors_server.http_url, "echo_int32", memory="wire", slots=2
    ) as session:
        kept = []
        for turn in range(12):
            sent = tensor("INT32", (1, 2, 1 + 700 * (turn % 3)), seed=turn)
            with session.lease() as lease:
                lease.write("INPUT__0", sent)
                kept.append((sent, lease.infer()["OUTPUT__0"]))
            del kept[:-2]
            for expected, view in kept:
                assert_same(view, expected)
        del view, kept
        all_free(session)


def test_threads_get_their_own_answers(tensors_server: TritonServer) -> None:
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        for turn in range(25):
            size = (1, 1 + (number * turn) % 40, 1 + 200 * (turn % 3))
            sent = tensor("UINT16", size, seed=(number, turn))
            assert_same(echo(session, sent), sent)

    with Session(
        tensors_server.http_url,
        "echo_uint16",
        memory="wire",
        slots=3,
        timeouts=Timeouts(lease=60),
    ) as session:
        with ThreadPoolExecutor(8) as pool:
            for future in [pool.submit(work, number) for number in range(8)]:
                future.result()
        assert all_free(session).connections <= 3


@pytest.mark.parametrize(
    ("shape", "told"),
    [((3, 4), r"\(3, 4\)"), ((1, 1, 1, 1), r"\(1, 1, 1, 1\)")],
)
def test_a_wrong_shape_is_refused_before_anything_is_sent(
    tensors_server: TritonServer, shape: tuple[int, ...], told: str
) -> None:
    url = tensors_server.http_url
    with FaultProxy(url) as proxy, Session(proxy.url, "echo_fp32", memory="wire") as s:
        before = sum(link.requests.passed for link in proxy.links)
        with pytest.raises(TensorMismatch, match=rf"'INPUT__0'.*{told}.*-1"):
            echo(s, np.zeros(shape, np.float32))
        assert sum(link.requests.passed for link in proxy.links) == before
        sent = tensor("FP32", (1, 1, 2))
        assert_same(echo(s, sent), sent)
        all_free(s)


def test_an_error_of_the_model_leaves_the_session_usable(
    models_server: TritonServer,
) -> None:
    def ask(token: int) -> list[int]:
        inputs = {"ORDER": np.array([token, 2, 0], np.int32)}
        listed: list[int] = session.infer(inputs)["REPLY"].tolist()
        return listed

    with Session(models_server.http_url, "moody", memory="wire", slots=1) as session:
        for token in range(1, 5):
            with pytest.raises(InferFailed, match=f"takes no -{token}"):
                ask(-token)
            assert ask(token) == [token] * 2
        all_free(session)


# --- faults ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", [How.CLOSE, How.RESET])
def test_a_reply_cut_in_its_middle_is_lost_and_the_next_one_right(
    tensors_server: TritonServer, how: How
) -> None:
    with (
        FaultProxy(tensors_server.http_url) as proxy,
        Session(proxy.url, "echo_uint8", memory="wire", slots=1) as session,
    ):
        for seed in range(3):
            sent = tensor("UINT8", LARGE, seed=seed)
            assert_same(echo(session, sent), sent)
            proxy.on_replies(cut_after=sent.nbytes // 2, how=how)
            with pytest.raises(RequestLost):
                echo(session, sent)
            proxy.heal()
        sent = tensor("UINT8", (1, 1, 3))
        assert_same(echo(session, sent), sent)
        all_free(session)


def test_a_request_cut_in_its_middle_costs_no_call_but_its_own(
    tensors_server: TritonServer,
) -> None:
    with (
        FaultProxy(tensors_server.http_url) as proxy,
        Session(proxy.url, "echo_uint8", memory="wire", slots=1) as session,
    ):
        sent = tensor("UINT8", LARGE)
        assert_same(echo(session, sent), sent)
        proxy.on_requests(cut_after=sent.nbytes // 2)
        # Cut before its last byte left, it may be sent again or told as lost.
        with contextlib.suppress(RequestLost):
            assert_same(echo(session, sent), sent)
        proxy.heal()
        assert_same(echo(session, sent), sent)
        all_free(session)


def test_a_late_reply_is_nobodys_answer(own_server: TritonServer) -> None:
    with Session(
        own_server.http_url,
        "sink",
        memory="wire",
        slots=2,
        shapes={"INPUT__0": frame(0).shape},
    ) as session:
        assert sink(session, 1) == 1
        with stopped(own_server), session.lease() as lease:
            fill(lease, 2)
            given_up(lambda limit: lease.infer(timeout=limit))
        for value in range(3, 9):
            assert sink(session, value) == value
        all_free(session)


def test_a_server_that_was_restarted_is_found_again(own_server: TritonServer) -> None:
    with Session(own_server.http_url, "sink", memory="wire", slots=1) as session:
        assert sink(session, 1) == 1
        own_server.restart()
        assert sink(session, 2) == 2
        all_free(session)
