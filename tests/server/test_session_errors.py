"""What goes wrong before an answer: each time the error that says what to do."""

from __future__ import annotations

import contextlib
import http.server
import json
import shutil
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmlane import (
    AccessRestricted,
    Connection,
    InferFailed,
    ModelNotReady,
    OutOfSharedMemory,
    ProtocolError,
    RegionOptions,
    ServerUnreachable,
    Session,
    ShmlaneError,
    TensorMismatch,
    Timeouts,
    UnknownTensor,
    UsageError,
)
from shmlane.server import TritonServer, demo_models
from tests.sessions import all_free, order, registered, sink

pytestmark = pytest.mark.usefixtures("no_leftovers")

IN_A_PRIVATE_SHM = """
import sys, os
import shmlane
url, slots = sys.argv[1], int(sys.argv[2])
try:
    shmlane.Session(url, "sink", slots=slots).open()
except shmlane.RegionError as error:
    print(type(error).__name__, error)
print(*os.listdir("/dev/shm"))
"""


# --- who is asked ---------------------------------------------------------------------


@contextlib.contextmanager
def listening(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of something that is not Triton and treats each client so."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client:
                    answer(client)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield "{}:{}".format(*listener.getsockname())
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextlib.contextmanager
def plain_http() -> Iterator[str]:
    class Silent(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield "{}:{}".format(*server.server_address)
        finally:
            server.shutdown()
            thread.join()


def test_nobody_listening_is_named_with_the_limit(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        tcp = "{}:{}".format(*taken.getsockname())
        for url in (tcp, f"http://{tcp}", f"unix://{tmp_path}/none.sock"):
            session = Session(url, "sink", timeouts=Timeouts(connect=0.05))
            for _ in range(2):
                with pytest.raises(ServerUnreachable) as it:
                    session.open()
                assert url.removeprefix("http://") in str(it.value)
                assert "within 0.05 s" in str(it.value)
                assert it.value.retryable
            assert "not open" in repr(session)


def test_a_web_server_is_not_taken_for_triton() -> None:
    with (
        plain_http() as url,
        pytest.raises(ProtocolError, match="not answered like Triton") as it,
    ):
        Session(url, "sink").open()
    assert "tritonserver" in it.value.hint


@pytest.mark.parametrize(
    ("greeting", "error", "message"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", ProtocolError, "not an HTTP"),
        (b"", ServerUnreachable, "did not answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", ProtocolError, "Triton"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n<>", ProtocolError, "not JSON"),
    ],
    ids=["SSH", "hangs up", "other JSON", "no JSON"],
)
def test_other_servers_are_not_taken_for_triton(
    greeting: bytes, error: type[ShmlaneError], message: str
) -> None:
    def greet(client: socket.socket) -> None:
        client.recv(4096)
        client.sendall(greeting)

    with listening(greet) as url, pytest.raises(error, match=message):
        Session(url, "sink").open()


def test_a_server_that_never_answers_is_given_up() -> None:
    released = threading.Event()
    limits = Timeouts(infer=0.1)

    def hold(_client: socket.socket) -> None:
        released.wait(10)

    with listening(hold) as url:
        session = Session(url, "sink", timeouts=limits)
        with pytest.raises(ServerUnreachable, match=r"within 0\.1 s"):
            session.open()
        released.set()


@pytest.mark.parametrize(
    "url",
    [
        "grpc://localhost:8001",
        "grpc+unix:///run/grpc.sock",
        "https://localhost:8000",
        "ftp://localhost",
        "",
        ":8000",
        "localhost:http",
        "localhost:70000",
        "localhost:0",
        "localhost:8000/v2",
        "user@localhost:8000",
        "unix://run/http.sock",
        "unix:///" + "x" * 120,
    ],
)
def test_addresses_that_cannot_be_used_are_refused_at_once(url: str) -> None:
    with pytest.raises(UsageError) as it:
        Session(url, "sink")
    assert repr(url) in str(it.value)


# --- what is asked for ----------------------------------------------------------------


def test_a_missing_model_is_told_with_those_there_are(server: TritonServer) -> None:
    with pytest.raises(ModelNotReady, match=r"'yolo'; it has: identity, sink") as it:
        Session(server.http_url, "yolo").open(wait=None)
    assert not it.value.retryable
    assert it.value.context["models"] == ["identity", "sink"]


def test_a_missing_version_is_told_with_those_there_are(server: TritonServer) -> None:
    match = r"version 7 of model 'sink' is not ready.*version 1: READY"
    with pytest.raises(ModelNotReady, match=match):
        Session(server.http_url, "sink", version="7").open(wait=0.1)


MISTAKES: list[tuple[dict[str, Any], type[UsageError], str]] = [
    ({"slots": 0}, UsageError, "slots=0"),
    ({"slots": -3}, UsageError, "slots=-3"),
    ({"slots": 1.5}, UsageError, "slots=1.5"),
    ({"slots": "4"}, UsageError, "slots='4'"),
    ({"version": "1/infer"}, UsageError, "model version '1/infer'"),
    ({"shapes": {"IN": (1, 1, 1, 1)}}, UnknownTensor, "no input 'IN'"),
    ({"shapes": {"INPUT__0": (3, 4)}}, TensorMismatch, r"the model allows"),
    ({"shapes": {"INPUT__0": (1, 1, 1, -1)}}, TensorMismatch, "the model allows"),
    ({"outputs": ["OUT"]}, UnknownTensor, "no output 'OUT'.*'OUTPUT__0'"),
    ({"outputs": []}, UsageError, "at least one output"),
    ({"outputs": "OUTPUT__0"}, UsageError, "one string"),
    ({"outputs": {"OUTPUT__0": (2,)}}, TensorMismatch, "the model allows"),
]


@pytest.mark.parametrize(
    ("arguments", "error", "message"), MISTAKES, ids=[str(row[0]) for row in MISTAKES]
)
def test_arguments_that_cannot_work_are_refused(
    server: TritonServer,
    arguments: dict[str, Any],
    error: type[UsageError],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        Session(server.http_url, "sink", **arguments).open()


@pytest.mark.parametrize("model", ["", "a b", "a/b", "..", "sink?x", "modèle"])
def test_model_names_that_cannot_be_sent_are_refused(model: str) -> None:
    with pytest.raises(UsageError, match="model name") as it:
        Session("localhost:8000", model)
    assert model in str(it.value)


@pytest.mark.parametrize(
    "headers",
    [{"X Y": "1"}, {"X": "a\r\nb: c"}, {"Content-Length": "3"}, {"X": " "}],
    ids=["name", "value", "framing", "space"],
)
def test_headers_that_cannot_be_sent_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="header"):
        Session("localhost:8000", "sink", connection=Connection(headers=headers))


@pytest.fixture(scope="module")
def odd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Models that shmlane cannot use, or that have failed to load."""
    folder = tmp_path_factory.mktemp("odd")
    (identity,) = demo_models("identity")
    config = (identity / "identity" / "config.pbtxt").read_text()
    streams = config + "model_transaction_policy { decoupled: true }\n"
    broken = config.replace("shmlane_echo", "no_such_backend")
    for name, text in (("streams", streams), ("broken", broken)):
        shutil.copytree(identity / "identity", folder / name)
        (folder / name / "config.pbtxt").write_text(text.replace("identity", name))
    arguments = ["--exit-on-error=false", "--strict-readiness=false"]
    with TritonServer(folder, extra_args=arguments) as server:
        yield server


def test_decoupled_models_are_refused(odd_server: TritonServer) -> None:
    with pytest.raises(UsageError, match="'streams' is decoupled"):
        Session(odd_server.http_url, "streams").open()


def test_a_model_that_failed_to_load_is_told_with_the_reason(
    odd_server: TritonServer,
) -> None:
    match = r"'broken' is not ready.*UNAVAILABLE.*no_such_backend"
    with pytest.raises(ModelNotReady, match=match) as it:
        Session(odd_server.http_url, "broken").open(wait=0.1)
    assert it.value.retryable


# --- what the model says --------------------------------------------------------------


def test_a_failing_model_speaks_for_itself(models_server: TritonServer) -> None:
    with Session(models_server.http_url, "moody", slots=1) as session:
        for token in (-1, -2):
            with pytest.raises(InferFailed, match=f"moody takes no {token}"):
                session.infer({"ORDER": order(token)})
            reply = session.infer({"ORDER": order(5)})["REPLY"]
            assert reply.tolist() == [5]
        assert all_free(session).drains == 0


def test_a_lease_may_try_again_after_a_failure(models_server: TritonServer) -> None:
    with (
        Session(models_server.http_url, "moody") as session,
        session.lease() as lease,
    ):
        lease.write("ORDER", order(-9))
        with pytest.raises(InferFailed, match="moody takes no -9"):
            lease.infer()
        lease["ORDER"][0] = 9
        assert lease.infer()["REPLY"].tolist() == [9]


def test_a_shape_that_only_the_model_refuses_is_its_failure(
    server: TritonServer,
) -> None:
    with Session(server.http_url, "sink") as session:
        with pytest.raises(InferFailed, match="at least one element"):
            session.infer({"INPUT__0": np.empty((1, 1, 1, 0), np.float32)})
        assert sink(session, 6) == 6


# --- what the server or the machine does not allow ------------------------------------


KEY = Connection(headers={"x-key": "secret"})


@pytest.fixture(scope="module")
def restricted_url() -> Iterator[str]:
    """A server that allows shared memory to those with a key."""
    arguments = ["--http-restricted-api=shared-memory:x-key=secret"]
    with TritonServer(extra_args=arguments) as server:
        yield server.http_url


@pytest.mark.parametrize("headers", [{}, {"x-key": "wrong"}], ids=["none", "wrong"])
def test_a_restricted_api_asks_for_its_header(
    restricted_url: str, headers: dict[str, str]
) -> None:
    connection = Connection(headers=headers)
    session = Session(restricted_url, "sink", connection=connection)
    with pytest.raises(AccessRestricted, match=r"restricted.*'x-key'") as it:
        session.open()
    assert "Connection(headers=" in it.value.hint
    assert regions_of(restricted_url) == []


def test_a_restricted_api_works_with_its_header(restricted_url: str) -> None:
    with Session(restricted_url, "sink", slots=2, connection=KEY) as session:
        assert sink(session, 3, size=3) == 3
        assert sink(session, 4, size=3000) == 4
        assert len(regions_of(restricted_url)) == 3
    assert regions_of(restricted_url) == []


def regions_of(url: str) -> list[Any]:
    """What a restricted server has registered."""
    request = urllib.request.Request(
        f"http://{url}/v2/systemsharedmemory/status", headers=KEY.headers
    )
    with urllib.request.urlopen(request) as reply:
        regions: list[Any] = json.load(reply)
    return regions


def test_a_session_larger_than_its_limit_leaves_nothing(server: TritonServer) -> None:
    before = registered(server)
    session = Session(
        server.http_url,
        "sink",
        shapes={"INPUT__0": (1, 1, 1024, 1024)},
        region=RegionOptions(max_bytes=1 << 20),
    )
    with pytest.raises(OutOfSharedMemory, match="its limit is 1048576"):
        session.open()
    assert registered(server) == before
    assert "not open" in repr(session)


def in_a_private_shm(server: TritonServer, *, nbytes: int, slots: int) -> str:
    """What a session says that sees another /dev/shm, of so many bytes."""
    mount = f"mount -t tmpfs -o size={nbytes},mode=1777 tmpfs /dev/shm"
    command = f'{mount} && exec "$0" "$@"'
    ended = subprocess.run(
        [
            *("unshare", "-m", "--propagation", "private", "sh", "-c", command),
            *(sys.executable, "-W", "error", "-c", IN_A_PRIVATE_SHM),
            *(server.http_url, str(slots)),
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if "unshare" in ended.stderr or "mount:" in ended.stderr:
        pytest.skip(f"a private /dev/shm is not permitted here: {ended.stderr.strip()}")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_too_small_a_shm_is_an_error_before_it_is_used(server: TritonServer) -> None:
    told = in_a_private_shm(server, nbytes=1 << 20, slots=300)
    assert told.startswith("OutOfSharedMemory /dev/shm has too little room: wanted")
    assert "1048576 are free" in told
    assert "shm-size" in told
    assert told.endswith("\n\n"), "a file is left"


def test_a_server_that_sees_another_shm_is_told(server: TritonServer) -> None:
    told = in_a_private_shm(server, nbytes=1 << 20, slots=2)
    assert told.startswith("RegionNotVisible the server cannot open /dev/shm/shmlane.")
    assert "--ipc=host" in told
    assert told.endswith("\n\n"), "a file is left"
