"""A session against the scripted server: its main path, and each thing scripted."""

from __future__ import annotations

import contextlib
import gc
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from shmlane import (
    AccessRestricted,
    Connection,
    InferFailed,
    ModelNotReady,
    ProtocolError,
    RegionNotVisible,
    RegionOptions,
    RequestLost,
    ServerError,
    ServerUnreachable,
    Session,
    SharedMemoryDisabled,
    Timeouts,
    TransportError,
    UsageError,
)
from shmlane.testing import (
    Answer,
    Close,
    Delay,
    Duplicate,
    FakeModel,
    Fault,
    Garbage,
    Reset,
    ScriptedServer,
    Status,
    Truncate,
    identity_model,
    sink_model,
)
from tests.patience import given_up
from tests.polling import eventually
from tests.raw_http import RawConnection, get
from tests.sessions import Array, all_free, frame, region_files
from tests.unit.loopback import is_kept

NAME = "INPUT__0"
OUTPUT = "OUTPUT__0"
QUICK = Timeouts(infer=5.0, lease=5.0)


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    """A server that ends with all its threads, and what is left at its end."""
    before = set(threading.enumerate())
    with ScriptedServer([identity_model(), sink_model()]) as server:
        yield server
        server.release()
        assert server.regions == {}
    assert set(threading.enumerate()) <= before
    assert not server.crashed
    gc.collect()
    eventually(lambda: not own_regions(), lambda: f"no region is left: {own_regions()}")


@pytest.fixture
def session(scripted: ScriptedServer) -> Iterator[Session]:
    with in_place(scripted) as session:
        yield session


def in_place(server: ScriptedServer, *, slots: int = 2) -> Session:
    """A session whose input and output of eight numbers lie in shared memory."""
    shape = (1, 1, 1, 8)
    return Session(
        server.url,
        "identity",
        slots=slots,
        shapes={NAME: shape},
        outputs={OUTPUT: shape},
        timeouts=QUICK,
    )


def own_regions() -> list[str]:
    """Region files that exist and that this process maps, as client or as server."""
    maps = Path("/proc/self/maps").read_text()
    return [str(path) for path in region_files() if str(path) in maps]


def echo(session: Session, value: float, *, size: int = 8) -> Array:
    """What comes back of a frame that ends with `value`, through the short form."""
    sent = frame(value, size=size)
    came = session.infer({NAME: sent})[OUTPUT]
    np.testing.assert_array_equal(came, sent)
    return came


def futures() -> ThreadPoolExecutor:
    """Threads for calls that block; leaving the block waits for them."""
    return ThreadPoolExecutor(4)


# --- the main path --------------------------------------------------------------------


def test_identity_returns_what_was_sent_and_leaves_nothing_registered(
    scripted: ScriptedServer,
) -> None:
    with Session(scripted.url, "identity") as session:
        echo(session, 3.0)
        assert {region.byte_size for region in scripted.regions.values()}
        echo(session, 4.0)
    assert scripted.regions == {}
    assert scripted.leaked_descriptors == 0


def test_sink_returns_the_last_element(scripted: ScriptedServer) -> None:
    with Session(scripted.url, "sink") as session:
        assert session.infer({NAME: frame(7.0)})[OUTPUT] == [7.0]


def test_requests_are_recorded_in_order(
    scripted: ScriptedServer, session: Session
) -> None:
    echo(session, 1.0)
    calls = [(each.method, each.path) for each in scripted.requests]
    assert calls[0] == ("GET", "/v2")
    assert calls[-1] == ("POST", "/v2/models/identity/infer")
    assert scripted.requests[-1].headers["host"] == scripted.url


def test_growing_input_moves_to_a_larger_region(scripted: ScriptedServer) -> None:
    def largest() -> int:
        return max(region.byte_size for region in scripted.regions.values())

    with Session(scripted.url, "identity") as session:
        echo(session, 1.0, size=8)
        small = largest()
        echo(session, 2.0, size=1 << 16)
        assert largest() > small


def test_unix_socket_serves_and_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with ScriptedServer([identity_model()], unix_socket=path) as server:
        with Session(server.url, "identity") as session:
            echo(session, 1.0)
            server.restart()
            echo(session, 2.0)
        assert path.exists()
    assert not path.exists()


def test_metadata_tells_the_chosen_version() -> None:
    with (
        ScriptedServer([identity_model()], version="2.60.1") as server,
        Session(server.url, "identity") as session,
    ):
        assert session.metadata.server_version == "2.60.1"


def test_function_of_a_model_gets_batches_and_optional_inputs() -> None:
    model = FakeModel(
        "rows",
        inputs={"VALUES": ("FP32", (3,)), "MARKS": ("INT8", (2,), True)},
        outputs={"SUMS": ("FP32", (1,)), "MARKED": ("INT8", (2,))},
        run=lambda inputs: {
            "SUMS": inputs["VALUES"].sum(axis=1, keepdims=True),
            "MARKED": inputs.get(
                "MARKS", np.full((len(inputs["VALUES"]), 2), -1, np.int8)
            ),
        },
        max_batch_size=8,
    )
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    with ScriptedServer([model]) as server, Session(server.url, "rows") as session:
        came = session.infer({"VALUES": values})
        assert came["SUMS"].tolist() == [[3.0], [12.0]]
        assert came["MARKED"].tolist() == [[-1, -1], [-1, -1]]
        marks = np.array([[1, 2], [3, 4]], np.int8)
        assert session.infer({"VALUES": values, "MARKS": marks})["MARKED"][1, 1] == 4


def test_input_is_read_in_place_when_the_model_runs(
    scripted: ScriptedServer, session: Session
) -> None:
    with session.lease() as lease, futures() as run:
        view = lease[NAME]
        view[...] = 1.0
        with scripted.hold():
            result = run.submit(lease.infer)
            scripted.wait_for(1)
            # A client must not do this; a real server would see it as well.
            view[...] = 2.0
        assert result.result(10.0)[OUTPUT].max() == 2.0


# --- refusals -------------------------------------------------------------------------


def test_server_since_2_68_has_shared_memory_disabled() -> None:
    with ScriptedServer([identity_model()], version="2.68.0") as server:
        with pytest.raises(SharedMemoryDisabled, match="allow-client-shm"):
            Session(server.url, "identity").open()
        assert server.regions == {}


@pytest.mark.parametrize("version", ["2.39.0", "2.68.0", "2.72.0"])
def test_shared_memory_can_be_allowed_in_any_version(version: str) -> None:
    server = ScriptedServer([identity_model()], version=version, allow_client_shm=True)
    with server, Session(server.url, "identity") as session:
        echo(session, 1.0)
        echo(session, 2.0, size=1 << 12)


def test_restricted_api_wants_its_header() -> None:
    server = ScriptedServer([identity_model()], restricted_header=("x-key", "open"))
    with server:
        with pytest.raises(AccessRestricted, match="x-key"):
            Session(server.url, "identity").open()
        right = Connection(headers={"X-Key": "open"})
        with Session(server.url, "identity", connection=right) as session:
            echo(session, 1.0)


def test_apis_cannot_be_restricted_before_2_40() -> None:
    with pytest.raises(UsageError, match="cannot restrict"):
        ScriptedServer([], version="2.39.0", restricted_header=("key", "value"))


def test_server_with_another_shm_does_not_see_regions(tmp_path: Path) -> None:
    with ScriptedServer([identity_model()], shm_directory=tmp_path) as server:
        with pytest.raises(RegionNotVisible):
            Session(server.url, "identity").open()
        assert server.regions == {}


def test_model_that_is_loading_is_waited_for() -> None:
    model = identity_model()
    model.is_ready = False
    with ScriptedServer([model]) as server:
        session = Session(server.url, "identity")
        with pytest.raises(ModelNotReady, match="LOADING"):
            session.open()
        seen = len(server.requests)
        with futures() as run:
            opening = run.submit(session.open, wait=10.0)
            eventually(lambda: len(server.requests) > seen, "the session asks again")
            model.is_ready = True
            opening.result(10.0)
        echo(session, 1.0)
        session.close()


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("not mine"), 400), (KeyError("lost"), 500)]
)
def test_exception_of_a_model_is_its_error(error: Exception, status: int) -> None:
    def run(inputs: object) -> dict[str, Array]:
        raise error

    model = FakeModel(
        "m", inputs={"I": ("FP32", (1,))}, outputs={"O": ("FP32", (1,))}, run=run
    )
    with ScriptedServer([model]) as server, Session(server.url, "m") as session:
        with pytest.raises(InferFailed) as caught:
            session.infer({"I": np.ones(1, np.float32)})
        assert caught.value.context["status"] == status
        assert str(error.args[0]) in str(caught.value)
        all_free(session)


def test_output_that_the_function_leaves_out_is_no_stale_data() -> None:
    answers = [{"O": np.ones(1, np.float32)}, {}]
    model = FakeModel(
        "m",
        inputs={"I": ("FP32", (1,))},
        outputs={"O": ("FP32", (1,))},
        run=lambda inputs: answers.pop(0),
    )
    with ScriptedServer([model]) as server, Session(server.url, "m") as session:
        given = {"I": np.zeros(1, np.float32)}
        assert session.infer(given)["O"] == [1.0]
        with pytest.raises(InferFailed, match="missing: O"):
            session.infer(given)
        all_free(session)


# --- restart and strangers ------------------------------------------------------------


def test_restart_forgets_regions_and_the_session_registers_again(
    scripted: ScriptedServer, session: Session
) -> None:
    echo(session, 1.0)
    url, before = scripted.url, set(scripted.regions)
    scripted.restart()
    assert scripted.url == url
    assert scripted.regions == {}
    echo(session, 2.0)
    assert not before & set(scripted.regions)
    all_free(session)


def test_stranger_who_unregisters_everything_goes_unnoticed(
    scripted: ScriptedServer, session: Session
) -> None:
    echo(session, 1.0)
    scripted.unregister_all()
    assert scripted.regions == {}
    echo(session, 2.0)
    assert scripted.regions


def test_request_held_at_a_restart_is_lost_and_writes_nothing(
    scripted: ScriptedServer, session: Session
) -> None:
    with session.lease() as lease, futures() as run:
        lease[NAME][...] = 5.0
        seen = [lease.infer()[OUTPUT]]
        seen[0][...] = -1.0
        lease[NAME][...] = 6.0
        with scripted.hold():
            lost = run.submit(lease.infer)
            scripted.wait_for(1)
            scripted.restart()
            with pytest.raises(RequestLost):
                lost.result(10.0)
        assert scripted.in_model == 0
        assert seen.pop().tolist() == [[[[-1.0] * 8]]]
    all_free(session)
    echo(session, 7.0)


def test_stopped_server_cannot_be_reached_until_it_starts(
    scripted: ScriptedServer,
) -> None:
    scripted.stop()
    hasty = Session(scripted.url, "identity", timeouts=Timeouts(connect=0.1))
    with pytest.raises(ServerUnreachable):
        hasty.open()
    scripted.start()
    with in_place(scripted) as session:
        echo(session, 1.0)


def test_nobody_is_given_the_port_of_a_stopped_server(
    scripted: ScriptedServer,
) -> None:
    scripted.stop()
    assert is_kept(scripted.url)
    scripted.start()
    with in_place(scripted) as session:
        echo(session, 1.0)


# --- holding --------------------------------------------------------------------------


def test_held_request_times_out_and_its_slot_comes_back_with_the_reply(
    scripted: ScriptedServer, session: Session
) -> None:
    with scripted.hold():
        with session.lease() as lease:
            lease.view(NAME, (1, 1, 1, 8))[...] = 1.0
            given_up(lambda limit: lease.infer(timeout=limit))
        assert session.stats().late == 1
        scripted.wait_for(1)
    assert all_free(session).late_replies == 1
    echo(session, 2.0)


def test_release_lets_go_of_those_who_wait_even_if_held_again(
    scripted: ScriptedServer, session: Session
) -> None:
    with futures() as run:
        scripted.hold()
        first = run.submit(echo, session, 1.0)
        scripted.wait_for(1)
        scripted.release()
        scripted.hold()
        first.result(10.0)
        second = run.submit(echo, session, 2.0)
        scripted.wait_for(1)
        assert not second.done()
        scripted.release()
        second.result(10.0)


def test_waiting_for_requests_that_do_not_come_ends(scripted: ScriptedServer) -> None:
    with pytest.raises(TimeoutError, match="no 2 requests"):
        scripted.wait_for(2, timeout=0.01)


def test_delay_keeps_one_request_inside_the_model(
    scripted: ScriptedServer, session: Session
) -> None:
    go = threading.Event()
    scripted.script(Delay(go), Delay(0.001))
    with futures() as run:
        slow = run.submit(echo, session, 1.0)
        scripted.wait_for(1)
        echo(session, 2.0)
        assert scripted.in_model == 1
        assert not slow.done()
        go.set()
        slow.result(10.0)


def test_delay_of_other_requests_holds_their_reply(scripted: ScriptedServer) -> None:
    go = threading.Event()
    scripted.script(Delay(go), path="/v2")
    with futures() as run:
        opening = run.submit(Session(scripted.url, "sink").open)
        eventually(lambda: len(scripted.requests) == 1, "the session asks")
        assert scripted.in_model == 0
        go.set()
        opening.result(10.0).close()


# --- faults ---------------------------------------------------------------------------


def wrong_id(reply: bytes) -> bytes:
    return re.sub(rb'"id":"\w', b'"id":"0', reply, count=1)


FAULTS: list[tuple[Fault, type[TransportError]]] = [
    (Close(), RequestLost),
    (Close(model_runs=False), RequestLost),
    (Reset(), RequestLost),
    (Truncate(0), RequestLost),
    (Truncate(5), RequestLost),
    (Truncate(100), RequestLost),
    (Garbage(), ProtocolError),
    (Status(504, "<html>", {"Content-Type": "text/html"}), RequestLost),
    (Status(200, "{}", {"Via": "1.1 proxy"}), RequestLost),
    (Answer(wrong_id), ProtocolError),
    (Answer(b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"), ProtocolError),
]


@pytest.mark.parametrize(
    ("fault", "error"), FAULTS, ids=lambda value: repr(value).partition(" at 0x")[0]
)
def test_fault_is_told_and_the_slot_comes_back(
    scripted: ScriptedServer,
    session: Session,
    fault: Fault,
    error: type[TransportError],
) -> None:
    echo(session, 1.0)
    echo(session, 2.0)
    scripted.script(fault)
    with pytest.raises(error):
        echo(session, 3.0)
    assert scripted.faults == ()
    all_free(session)
    for value in (4.0, 5.0, 6.0):
        echo(session, value)


def test_reply_comes_as_often_as_scripted(scripted: ScriptedServer) -> None:
    scripted.script(Duplicate(3), path="/v2")
    with RawConnection(scripted.url) as client:
        client.send(get("/v2"))
        first = client.read()
        assert first is not None
        assert [client.read(), client.read()] == [first, first]
        assert client.is_alive()


def test_reply_that_comes_twice_never_answers_another_request(
    scripted: ScriptedServer, session: Session
) -> None:
    scripted.script(Duplicate(), Duplicate(3))
    for value in range(8):
        # Found behind the first one or before the next request, as it happens.
        with contextlib.suppress(ProtocolError):
            echo(session, float(value))
    assert scripted.faults == ()
    all_free(session)


def test_server_closes_right_after_its_reply(
    scripted: ScriptedServer, session: Session
) -> None:
    scripted.script(
        Answer(
            lambda reply: reply.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        )
    )
    echo(session, 1.0)
    echo(session, 2.0)


def test_fault_for_a_path_waits_for_that_path(scripted: ScriptedServer) -> None:
    refusal = Status(503, '{"error":"busy"}', model_runs=False)
    scripted.script(refusal, path="/register")
    session = Session(scripted.url, "identity", slots=1)
    with pytest.raises(ServerError, match="busy"):
        session.open()
    assert scripted.faults == ()
    with session:
        echo(session, 1.0)


def test_lost_request_still_writes_and_its_region_stays_until_then(
    scripted: ScriptedServer, session: Session
) -> None:
    with session.lease() as lease:
        lease[NAME][...] = 1.0
        seen = [lease.infer()[OUTPUT]]
        seen[0][...] = -1.0
        scripted.hold()
        scripted.script(Close())
        with pytest.raises(RequestLost):
            lease.infer()
        scripted.wait_for(1)
    eventually(lambda: tried_to_unregister(scripted), "the session tries to drain")
    assert session.stats().lost == 1
    assert seen[0].max() == -1.0
    scripted.release()
    eventually(lambda: float(seen[0].max()) == 1.0, "the late output is written")
    seen.clear()
    assert all_free(session).drains == 1


def tried_to_unregister(server: ScriptedServer) -> bool:
    return any(each.path.endswith("/unregister") for each in server.requests)


@pytest.mark.parametrize("version", ["2.50.0", "2.53.0", "2.70.0"])
def test_lost_request_is_drained_in_every_way_of_unregistering(version: str) -> None:
    server = ScriptedServer([identity_model()], version=version, allow_client_shm=True)
    with server, Session(server.url, "identity", slots=1, timeouts=QUICK) as session:
        echo(session, 1.0)
        with server.hold():
            server.script(Close())
            with pytest.raises(RequestLost):
                echo(session, 2.0)
            server.wait_for(1)
            assert session.stats().lost == 1
        assert all_free(session).drains == 1
        echo(session, 3.0)
        assert not server.crashed


def test_lost_slot_is_retired_where_unregistering_ends_the_server() -> None:
    with (
        ScriptedServer([identity_model()], version="2.49.0") as server,
        Session(server.url, "identity", slots=1, timeouts=QUICK) as session,
    ):
        with server.hold():
            server.script(Close())
            with pytest.raises(RequestLost):
                echo(session, 1.0)
            eventually(lambda: session.stats().retired == 1, "the slot is retired")
        echo(session, 2.0)
        stats = session.stats()
        assert (stats.slots, stats.free, stats.lost) == (1, 1, 0)
        assert not server.crashed


# --- using it wrongly -----------------------------------------------------------------


def test_address_is_asked_for_too_early() -> None:
    server = ScriptedServer([identity_model()])
    with pytest.raises(UsageError, match="before it is started"):
        _ = server.url
    assert repr(server) == "<ScriptedServer 2.51.0 not running>"


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="two fake models"):
        ScriptedServer([identity_model(), identity_model()])


@pytest.mark.parametrize("tensor", [("FP33", (1,)), ("FP32", (-2,)), ("bf16", (1,))])
def test_tensor_that_cannot_be_is_refused(tensor: tuple[str, tuple[int, ...]]) -> None:
    with pytest.raises(UsageError, match="cannot be"):
        FakeModel("m", inputs={"I": tensor}, outputs={}, run=dict)


def test_server_tells_its_state(scripted: ScriptedServer, session: Session) -> None:
    scripted.hold()
    assert repr(scripted) == (
        f"<ScriptedServer 2.51.0 at {scripted.url}, 2 regions, 0 requests in the"
        " model, held>"
    )


def test_regions_may_be_made_with_any_options(scripted: ScriptedServer) -> None:
    options = RegionOptions(mode=0o666, prefault=False)
    with Session(scripted.url, "identity", region=options) as session:
        echo(session, 1.0)
