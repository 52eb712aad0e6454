"""`shmlane serve`: one line when ready, an honest exit code, no server left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmlane.server.health import Address, call
from tests.machine import is_running, write_model, write_program
from tests.polling import eventually

SHMLANE = [sys.executable, "-c", "from shmlane.cli import main; main()"]


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`shmlane serve` in a process of its own, killed at the end if it still runs."""
    process = subprocess.Popen(
        [*SHMLANE, "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        process.kill()


def ready_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    facts: dict[str, Any] = json.loads(process.stdout.readline())
    return facts


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run to the end: for calls that fail."""
    return subprocess.run(
        [*SHMLANE, "serve", *arguments], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_told_to_stop(number: signal.Signals) -> None:
    with serving() as process:
        facts = ready_line(process)
        port = int(facts["http_url"].removeprefix("127.0.0.1:"))
        reply = call(Address(port), "/v2/models/sink/ready")
        assert reply is not None
        assert reply[0] == 200
        process.send_signal(number)
        rest, messages = process.communicate(timeout=30)
    assert process.returncode == 0
    assert rest == ""
    assert "Traceback" not in messages
    assert not is_running(facts["pid"])


def test_its_line_has_what_a_program_needs() -> None:
    with serving() as process:
        facts = ready_line(process)
        assert facts["models"] == ["identity", "sink"]
        assert facts["grpc_url"].startswith("127.0.0.1:")
        assert facts["unix_url"] is None
        assert is_running(facts["pid"])
        assert "Started HTTPService" in Path(facts["log"]).read_text()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)


def test_it_serves_on_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with serving("--unix", str(path)) as process:
        facts = ready_line(process)
        assert facts["unix_url"] == f"unix://{path}"
        assert facts["http_url"] is None
        assert call(Address(unix_socket=str(path)), "/v2/health/live") is not None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert not path.exists()


def test_chosen_models_replace_the_default_ones() -> None:
    with serving("--demo", "sink", "--", "--log-verbose=1") as process:
        assert ready_line(process)["models"] == ["sink"]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)


def test_values_of_options_for_tritonserver_may_be_words_of_their_own() -> None:
    with serving("--json", "--demo", "sink", "--", "--log-verbose", "1") as process:
        assert ready_line(process)["models"] == ["sink"]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)


def test_a_folder_without_models_is_refused(tmp_path: Path) -> None:
    outcome = serve("--model-repository", str(tmp_path))
    assert outcome.returncode == 2
    assert outcome.stdout == ""
    assert f"{tmp_path} has no models in it" in outcome.stderr


def test_a_killed_command_leaves_no_server() -> None:
    with serving() as process:
        server = ready_line(process)["pid"]
        process.kill()
    eventually(lambda: not is_running(server), "the server has ended")


def test_a_server_that_dies_ends_the_command_with_failure() -> None:
    with serving() as process:
        facts = ready_line(process)
        os.kill(facts["pid"], signal.SIGKILL)
        _, messages = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "ended by itself" in messages
    assert facts["log"] in messages
    assert "memory runs out" in messages
    assert "Traceback" not in messages
    assert "by signal 9 (Killed), unasked" in Path(facts["log"]).read_text()


def test_a_stop_during_the_start_is_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    script = f"echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; exec sleep 60"
    program = write_program(tmp_path / "tritonserver", script)
    monkeypatch.setenv("SHMLANE_TRITONSERVER", str(program))
    with serving() as process:
        eventually(pid_file.exists, "the server is being started")
        process.send_signal(signal.SIGTERM)
        line, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert line == ""
    assert not is_running(int(pid_file.read_text()))


def test_a_failed_start_is_one_message(tmp_path: Path) -> None:
    write_model(tmp_path, config='backend: "no_such_backend"')
    outcome = serve("--model-repository", str(tmp_path))
    assert outcome.returncode == 1
    assert outcome.stdout == ""
    assert outcome.stderr.startswith("shmlane: ")
    assert "no_such_backend" in outcome.stderr
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--no-such-flag"], "--no-such-flag"),
        (["--http-port", "70000"], "--http-port"),
        (["--demo", "yolo"], "yolo"),
        (["--unix", "/tmp/" + "a" * 120], "125 bytes"),
        (["--model-repository", "/no/such/folder"], "/no/such/folder"),
        (["resnet50"], "--demo resnet50"),
        (["--", "--log-verbose", "1", "resnet50"], "--demo resnet50"),
        (["--unix", "/tmp/http.sock", "--http-port", "8123"], "8123"),
        (["--unix", "/no/such/folder/http.sock"], "mkdir -p /no/such/folder"),
    ],
)
def test_a_wrong_call_is_told_as_such(arguments: list[str], named: str) -> None:
    outcome = serve(*arguments)
    assert outcome.returncode == 2
    assert outcome.stdout == ""
    assert named in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_a_named_server_that_is_missing_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHMLANE_TRITONSERVER", str(tmp_path / "tritonserver"))
    outcome = serve()
    assert outcome.returncode == 2
    assert f"{tmp_path}/tritonserver, which does not exist" in outcome.stderr
