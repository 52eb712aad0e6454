"""A server's life: it restarts, it fails with a reason, it never outlives its owner."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmlane import ModelNotReady, Session
from shmlane.errors import ServerUnreachable, UsageError
from shmlane.server import TritonServer
from tests.machine import children, is_running, parent, write_model
from tests.polling import eventually

SHM = Path("/dev/shm")


@pytest.fixture
def own() -> Iterator[TritonServer]:
    """A server that a test may break."""
    server = TritonServer()
    server.start()
    yield server
    server.kill()


@pytest.fixture
def with_python(tmp_path: Path) -> Iterator[TritonServer]:
    """A server of one Python model that keeps a stub process and a segment."""
    config = (
        'backend: "python"\n'
        'input [{ name: "A" data_type: TYPE_FP32 dims: [ -1 ] }]\n'
        'output [{ name: "B" data_type: TYPE_FP32 dims: [ -1 ] }]\n'
    )
    repository = write_model(tmp_path, config=config)
    program = "class TritonPythonModel:\n    def execute(self, requests): return []\n"
    (repository / "model" / "1" / "model.py").write_text(program)
    server = TritonServer(repository)
    server.start()
    yield server
    server.kill()


def segments(server: TritonServer) -> list[Path]:
    """What the server itself keeps in shared memory."""
    return list(SHM.glob(f"{server.log_path.stem}_*"))


# --- starting and stopping ------------------------------------------------------------


def test_restart_keeps_the_addresses(own: TritonServer) -> None:
    addresses, first = (own.http_url, own.grpc_url), own.pid
    own.restart()
    assert (own.http_url, own.grpc_url) == addresses
    assert own.pid != first
    assert own.call("/v2/health/ready")[0] == 200


def test_a_killed_server_starts_again_on_its_addresses(own: TritonServer) -> None:
    addresses, first = (own.http_url, own.grpc_url), own.pid
    own.kill()
    assert not own.is_alive
    assert not is_running(first)
    with pytest.raises(ServerUnreachable, match="does not answer"):
        own.call("/v2/health/ready")
    own.start()
    assert (own.http_url, own.grpc_url) == addresses
    assert own.call("/v2/health/ready")[0] == 200


def test_a_crash_from_outside_is_noticed(own: TritonServer) -> None:
    os.kill(own.pid, signal.SIGKILL)
    eventually(lambda: not own.is_alive, "the server is known to be dead")
    assert repr(own) == "<TritonServer ended with 137>"


def test_stopping_twice_is_harmless(own: TritonServer) -> None:
    own.stop()
    own.stop()
    assert not own.is_alive


def test_starting_a_running_server_is_refused(own: TritonServer) -> None:
    with pytest.raises(UsageError, match=r"is running.*restart"):
        own.start()
    assert own.is_alive


def test_a_server_without_a_start_says_so() -> None:
    server = TritonServer()
    assert repr(server) == "<TritonServer not started>"
    assert not server.is_alive
    assert server.log_text() == ""
    server.stop()
    for ask in ("http_url", "grpc_url", "pid", "version"):
        with pytest.raises(UsageError, match="start"):
            getattr(server, ask)


def test_its_repr_names_pid_and_addresses(own: TritonServer) -> None:
    assert f"pid {own.pid}" in repr(own)
    assert own.http_url in repr(own)
    assert own.grpc_url in repr(own)


def test_its_log_has_what_the_server_printed(own: TritonServer) -> None:
    assert "Started HTTPService" in own.log_text()
    own.stop()
    assert "Started HTTPService" in own.log_text()


def test_two_servers_with_python_models_live_side_by_side(
    with_python: TritonServer, tmp_path: Path
) -> None:
    with TritonServer(tmp_path) as other:
        assert other.http_url != with_python.http_url
        assert set(segments(other)).isdisjoint(segments(with_python))
    assert with_python.call("/v2/models/model/ready")[0] == 200
    assert segments(with_python) != []


def test_options_reach_the_server_after_all_others() -> None:
    arguments = ["--strict-readiness=false", "--id=renamed"]
    with TritonServer(extra_args=arguments) as server:
        assert server.call("/v2")[1]["name"] == "renamed"


@pytest.mark.parametrize("named", ["model", "*"])
def test_models_in_python_may_be_named_one_by_one(
    with_python: TritonServer, tmp_path: Path, named: str
) -> None:
    with_python.stop()
    arguments = ["--model-control-mode", "explicit", f"--load-model={named}"]
    with TritonServer(tmp_path, extra_args=arguments) as server:
        assert server.model_names() == ["model"]


def test_the_model_that_checks_a_server_is_not_among_its_models(
    with_python: TritonServer,
) -> None:
    with pytest.raises(ModelNotReady, match=r"it has: model\.$"):
        Session(with_python.http_url, "other").open()


# --- nothing is left behind -----------------------------------------------------------


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_no_stub_or_segment_outlives_its_server(
    with_python: TritonServer, end: str
) -> None:
    stubs = children(with_python.pid)
    assert stubs
    assert segments(with_python)
    getattr(with_python, end)()
    assert [pid for pid in stubs if is_running(pid)] == []
    assert segments(with_python) == []


def test_stubs_of_a_crashed_server_are_ended(with_python: TritonServer) -> None:
    stubs = children(with_python.pid)
    os.kill(with_python.pid, signal.SIGKILL)
    eventually(lambda: not with_python.is_alive)
    assert [pid for pid in stubs if is_running(pid)] == []
    assert segments(with_python) == []


def test_a_server_ends_when_its_keeper_is_killed(own: TritonServer) -> None:
    os.kill(parent(own.pid), signal.SIGKILL)
    eventually(lambda: not is_running(own.pid), "the server has ended")


OWNER = """
import os, sys, time
from shmlane.server import TritonServer
server = TritonServer(unix_socket=sys.argv[1])
server.start()
{then}
"""
FORK_AND_STAY = """
child = os.fork()
print(server.pid, child or os.getpid(), flush=True) if child else None
time.sleep(60)
"""


def start_owner(socket_path: Path, then: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OWNER.format(then=then), str(socket_path)],
        stdout=subprocess.PIPE,
        text=True,
    )


def read_numbers(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


def test_a_server_ends_with_a_killed_owner(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    then = "print(server.pid, flush=True); time.sleep(60)"
    with start_owner(path, then) as owner:
        (server,) = read_numbers(owner)
        assert is_running(server)
        owner.kill()
    eventually(lambda: not is_running(server), "the server has ended")
    eventually(lambda: not path.exists(), "its socket is removed")


def test_a_forked_child_does_not_keep_a_killed_owners_server(tmp_path: Path) -> None:
    with start_owner(tmp_path / "http.sock", FORK_AND_STAY) as owner:
        server, child = read_numbers(owner)
        try:
            owner.kill()
            eventually(lambda: not is_running(server), "the server has ended")
            assert is_running(child)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_server_ends_with_an_owner_that_forgets_it(tmp_path: Path) -> None:
    with start_owner(tmp_path / "http.sock", "print(server.pid)") as owner:
        (server,) = read_numbers(owner)
    assert owner.returncode == 0
    assert not is_running(server)


def test_a_forgotten_server_ends_when_it_is_collected() -> None:
    server = TritonServer()
    server.start()
    pid = server.pid
    del server
    assert not is_running(pid)


def test_a_forked_child_cannot_end_its_parents_server(own: TritonServer) -> None:
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            alive = own.is_alive
            own.stop()
            own.kill()
            os._exit(1 if alive else 0)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert own.is_alive
    assert own.call("/v2/health/ready")[0] == 200
