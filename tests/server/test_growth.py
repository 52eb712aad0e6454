"""Blocks that grow while requests are in flight, and then serve in place."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from shmlane import OutOfSharedMemory, RegionOptions, Session, Timeouts
from shmlane.server import TritonServer
from tests.fault_proxy import FaultProxy
from tests.sessions import Array, all_free
from tests.tensor_values import assert_same, tensor

pytestmark = pytest.mark.usefixtures("no_leftovers")

THREADS = 8
TURNS = 40
SIZES = (1, 10, 1000, 3, 40_000, 500, 200_000, 7)
# A reply whose output lies in shared memory is shorter than this.
REPLY_BYTES = 1024


def echo(session: Session, sent: Array) -> Array:
    return session.infer({"INPUT__0": sent})["OUTPUT__0"]


def of_size(elements: int, *, seed: object = 0) -> Array:
    return tensor("UINT8", (1, 1, elements), seed=seed)


def replied(proxy: FaultProxy) -> int:
    """Bytes that have come back over the connections that exist now."""
    return sum(link.replies.passed for link in proxy.links)


def under_load(session: Session, *, turns: int = TURNS) -> None:
    """Threads with sizes that differ from call to call; every value is checked."""
    start = threading.Barrier(THREADS)

    def work(number: int) -> None:
        random = np.random.default_rng(number)
        start.wait()
        for turn in range(turns):
            sent = of_size(int(random.choice(SIZES)), seed=(number, turn))
            assert_same(echo(session, sent), sent)

    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(work, number) for number in range(THREADS)]:
            future.result()


def in_every_slot(session: Session, sent: Array) -> None:
    """The same request in each slot, all leased at once."""
    with ExitStack() as stack:
        leases = [
            stack.enter_context(session.lease()) for _ in range(session.stats().slots)
        ]
        for lease in leases:
            lease.write("INPUT__0", sent)
            assert_same(lease.infer().copy()["OUTPUT__0"], sent)


def test_no_call_fails_while_blocks_grow_under_load(
    tensors_server: TritonServer,
) -> None:
    with Session(
        tensors_server.http_url, "echo_uint8", slots=4, timeouts=Timeouts(lease=60)
    ) as session:
        before = session.stats()
        under_load(session)
        stats = all_free(session)
        assert stats.growths > 0
        assert stats.shared_bytes > before.shared_bytes
        assert stats.retries == stats.drains == stats.reregistrations == 0


def test_after_growth_outputs_come_through_shared_memory(
    tensors_server: TritonServer,
) -> None:
    with (
        FaultProxy(tensors_server.http_url) as proxy,
        Session(
            proxy.url, "echo_uint8", slots=4, timeouts=Timeouts(lease=60)
        ) as session,
    ):
        under_load(session)
        for size in SIZES:
            for seed in range(2):
                in_every_slot(session, of_size(size, seed=seed))
        before, growths = replied(proxy), session.stats().growths
        under_load(session)
        assert session.stats().growths == growths
        assert replied(proxy) - before < THREADS * TURNS * REPLY_BYTES
        all_free(session)


def test_the_second_call_of_a_size_needs_the_wire_no_more(
    tensors_server: TritonServer,
) -> None:
    with (
        FaultProxy(tensors_server.http_url) as proxy,
        Session(proxy.url, "echo_uint8", slots=1) as session,
    ):
        for size in (50_000, 70_000, 60_000):
            # Over the wire, as nobody knows the size, then in place.
            for seed, limits in enumerate(
                [(size, size + REPLY_BYTES), (1, REPLY_BYTES)]
            ):
                before = replied(proxy)
                sent = of_size(size, seed=seed)
                assert_same(echo(session, sent), sent)
                assert limits[0] <= replied(proxy) - before < limits[1]
        assert session.stats().growths > 0
        all_free(session)


def test_growth_stops_at_the_limit_and_smaller_sizes_go_on(
    tensors_server: TritonServer,
) -> None:
    with Session(
        tensors_server.http_url,
        "echo_uint8",
        slots=2,
        region=RegionOptions(max_bytes=1 << 20),
    ) as session:
        with pytest.raises(OutOfSharedMemory, match=r"limit is 1048576") as it:
            echo(session, of_size(2 << 20))
        assert "max_bytes" in it.value.hint
        for seed in range(4):
            sent = of_size(1000, seed=seed)
            assert_same(echo(session, sent), sent)
        assert all_free(session).shared_bytes <= 1 << 20


def test_views_of_before_a_growth_stay_what_they_were(
    tensors_server: TritonServer,
) -> None:
    with Session(tensors_server.http_url, "echo_uint8", slots=2) as session:
        kept = []
        for turn, size in enumerate((10, 10, 5000, 5000, 300_000, 300_000)):
            sent = of_size(size, seed=turn)
            with session.lease() as lease:
                lease.write("INPUT__0", sent)
                kept.append((sent, lease.infer()["OUTPUT__0"]))
            for expected, view in kept[-3:]:
                assert_same(view, expected)
            del kept[:-2]
        del view, kept
        all_free(session)


def test_an_output_that_varies_comes_whole_from_the_first_call(
    tensors_server: TritonServer,
) -> None:
    # One shape of inputs, many sizes of output: each call runs the model once.
    url = tensors_server.http_url
    with Session(url, "repeated", slots=1) as session:
        runs = inferences(tensors_server, "repeated")
        for turn, count in enumerate((3, 3, 900, 3, 0, 5000, 5000, 1)):
            assert repeat(session, turn, count) == [turn] * count
            runs += 1
            assert inferences(tensors_server, "repeated") == runs
        all_free(session)


def repeat(session: Session, value: int, count: int) -> list[float]:
    inputs = {
        "VALUES": np.array([value], np.float32),
        "COUNTS": np.array([count], np.int32),
    }
    listed: list[float] = session.infer(inputs)["REPEATED"].tolist()
    return listed


def test_a_model_is_run_again_only_where_that_was_allowed(
    tensors_server: TritonServer,
) -> None:
    counts = (3, 3, 900, 3, 0, 5000, 5000, 1, 6000)
    url = tensors_server.http_url
    with Session(url, "repeated", slots=1, rerun=True) as session:
        before = inferences(tensors_server, "repeated")
        for turn, count in enumerate(counts):
            assert repeat(session, turn, count) == [turn] * count
        stats = all_free(session)
        assert 0 < stats.reruns < len(counts)
        runs = inferences(tensors_server, "repeated") - before
        assert runs == len(counts) + stats.reruns


def inferences(server: TritonServer, model: str) -> int:
    """How often the server has run a model."""
    told = server.call(f"/v2/models/{model}/stats")[1]["model_stats"][0]
    ended = told["inference_stats"]
    return int(ended["success"]["count"]) + int(ended["fail"]["count"])
