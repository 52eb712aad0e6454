"""`shmlane clean` and `shmlane ls` where something is left: words and exit codes."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="needs the extra [cli]")

from typer.testing import CliRunner, Result

from shmlane import regions
from shmlane.cli.app import app
from shmlane.testing import ScriptedServer, sink_model
from tests.unit.dead_regions import left_behind

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm")

KEY = {"X-Key": "a=b"}
# What makes a terminal red and renames its window, a line of its own, and text that is
# read from right to left.
ESCAPES = "\x1b[31m\x1b]0;x\x07\nremoved\u202e\x9b2J"
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can give files away"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(regions, "SHM_DIRECTORY", str(tmp_path))
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[ScriptedServer]:
    """A server that restricts everything about shared memory, and a dead region."""
    with ScriptedServer(
        [sink_model()], shm_directory=folder, restricted_header=("X-Key", "a=b")
    ) as server:
        left_behind(folder, "dead", server.url, headers=KEY)
        yield server


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_what_the_server_may_still_know_is_kept_told_and_counts_as_failed(
    folder: Path, server: ScriptedServer
) -> None:
    told = run("clean", "--yes")
    assert told.stdout.startswith("kept shmlane.dead: listing shared memory regions is")
    assert "--header" in told.stderr
    assert told.exit_code == 1
    assert (folder / "shmlane.dead").exists()
    assert server.regions


def test_with_the_header_that_it_expects_a_server_forgets(
    folder: Path, server: ScriptedServer
) -> None:
    told = run("clean", "--yes", "--header", "Other=1", "--header", "X-Key=a=b")
    assert told.stdout == "removed shmlane.dead\nunregistered shmlane.dead.0.0\n"
    assert told.exit_code == 0
    assert not server.regions
    assert run("clean", "--yes").stdout == "nothing to remove\n"


def test_by_force_the_file_goes_whatever_the_server_says(
    folder: Path, server: ScriptedServer
) -> None:
    told = run("clean", "--yes", "--force")
    assert told.stdout == "removed shmlane.dead\n"
    assert told.exit_code == 0
    assert list(folder.iterdir()) == []


def test_force_alone_removes_nothing(folder: Path, server: ScriptedServer) -> None:
    told = run("clean", "--force")
    assert "nothing was removed" in told.stdout
    assert (folder / "shmlane.dead").exists()


def test_programs_are_told_too_what_was_kept(server: ScriptedServer) -> None:
    told = run("clean", "--yes", "--json")
    answer = json.loads(told.stdout)
    assert (answer["files"], answer["registrations"]) == ([], [])
    assert list(answer["kept"]) == ["shmlane.dead"]
    assert told.exit_code == 1


@pytest.mark.parametrize("header", ["X-Key", "X-Key=", "=a", "="])
def test_a_header_without_name_or_value_is_refused(folder: Path, header: str) -> None:
    told = run("clean", "--yes", "--header", header)
    assert told.exit_code == 2
    assert "is not NAME=VALUE" in told.stderr


@needs_root
def test_dead_regions_of_others_are_not_promised_to_be_removed(folder: Path) -> None:
    path = left_behind(folder, "theirs", "h:1", registered=False)
    os.chown(path, 65534, 65534)
    assert run("clean").stdout == "nothing to remove\n"
    assert run("clean", "--yes").stdout == "nothing to remove\n"
    assert path.exists()


@pytest.mark.parametrize("name", ["shmlane.[x]", "shmlane.[bold]x[|bold]"])
def test_a_name_that_looks_like_markup_is_shown_as_it_is(
    folder: Path, name: str
) -> None:
    (folder / name).touch()
    told = run("ls")
    assert told.exit_code == 0
    assert name in told.stdout


@needs_root
def test_nothing_is_said_about_a_server_that_is_not_asked(folder: Path) -> None:
    path = left_behind(folder, "theirs", "h:1", registered=False)
    os.chown(path, 65534, 65534)
    heading, line = run("ls").stdout.splitlines()
    cells = dict(zip(heading.split(), re.split("  +", line), strict=True))
    assert (cells["owner"], cells["registered"], cells["server"]) == (
        "dead 7",
        "-",
        "h:1",
    )


def test_a_server_that_does_not_answer_is_called_silent(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"127.0.0.1:{listener.getsockname()[1]}"
        left_behind(folder, "mine", url, registered=False)
        listener.settimeout(10)
        answering = threading.Thread(target=lambda: listener.accept()[0].close())
        answering.start()
        assert "server silent" in run("ls").stdout
        answering.join()


def test_a_server_that_is_gone_is_called_so_and_keeps_nothing(folder: Path) -> None:
    with ScriptedServer([sink_model()], shm_directory=folder) as server:
        left_behind(folder, "mine", server.url)
    assert "server gone" in run("ls").stdout
    told = run("clean", "--yes")
    assert told.stdout == "removed shmlane.mine\n"
    assert told.exit_code == 0


def test_a_server_that_refuses_is_not_called_silent(server: ScriptedServer) -> None:
    assert "server refuses" in run("ls").stdout


def test_what_cannot_be_known_is_a_dash(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = left_behind(folder, "theirs", "h:1", registered=False)
    really_open = os.open

    def refuse(name: Any, *arguments: Any, **others: Any) -> int:
        if str(name) == str(path):
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return really_open(name, *arguments, **others)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    told = run("ls")
    assert told.exit_code == 0
    _, line = told.stdout.splitlines()
    assert re.split("  +", line)[2:] == ["-", "-", "-", "-"]


def test_a_terminal_obeys_nothing_that_stands_in_a_file(
    folder: Path, server: ScriptedServer
) -> None:
    name, url, model = (f"{text}{ESCAPES}" for text in ("name", "h:1", "m"))
    left_behind(folder, name, url, model=model, registered=False)
    for arguments in (["ls"], ["clean"], ["clean", "--yes"], ["ls", "--json"]):
        told = run(*arguments)
        assert told.exit_code in (0, 1)
        lines = told.stdout.split("\n")
        assert all(line.isprintable() for line in lines), arguments
        assert not any(line.startswith("removed\\") for line in lines)
    assert "m\\x1b[31m" in run("ls").stdout


def test_names_in_any_script_are_shown_as_they_are(folder: Path) -> None:
    left_behind(folder, "区域", "h:1", model="modèle", registered=False)
    assert "shmlane.区域" in run("ls").stdout
    assert "modèle" in run("ls").stdout


def test_a_name_that_is_no_text_is_shown(folder: Path) -> None:
    (folder / os.fsdecode(b"shmlane.\xff")).touch()
    assert "shmlane.\\udcff" in run("ls").stdout
