"""Where servers, interpreters and environments come from, and what is told if not."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shmlane.errors import InstallFailed, UsageError
from shmlane.server import cache, interpreters, managed, programs
from tests.machine import write_program

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache"
    monkeypatch.setenv("SHMLANE_CACHE", str(root))
    return root


# --- which server ---------------------------------------------------------------------


def test_a_named_server_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = write_program(tmp_path / "mine", "exit 0")
    on_path = write_program(tmp_path / "tritonserver", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert managed.find_installation().executable == on_path
    monkeypatch.setenv("SHMLANE_TRITONSERVER", str(named))
    found = managed.find_installation()
    assert found == managed.Installation(named, is_managed=False)
    assert found.arguments(python_models=True) == []
    assert managed.describe() == str(named)


def test_a_named_server_that_cannot_be_run_is_no_reason_to_look_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tritonserver"
    monkeypatch.setenv("SHMLANE_TRITONSERVER", str(path))
    with pytest.raises(UsageError, match="does not exist"):
        managed.find_installation()
    path.write_text("not a program")
    with pytest.raises(UsageError, match="is not executable"):
        managed.find_installation()


# --- making a thing once --------------------------------------------------------------


def make_and_count(folder: Path, log: Path) -> None:
    def build(folder: Path) -> None:
        with log.open("a") as file:
            file.write("built\n")
        (folder / "half").touch()
        (folder / "whole").touch()

    assert (cache.make_once(folder, build) / "whole").exists()


def test_two_processes_at_once_make_a_thing_once(tmp_path: Path) -> None:
    arguments = (tmp_path / "thing", tmp_path / "log")
    workers = [SPAWN.Process(target=make_and_count, args=arguments) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "built\n"


def test_threads_at_once_make_a_thing_once(tmp_path: Path) -> None:
    built: list[Path] = []
    gate = threading.Barrier(4)

    def ask() -> None:
        gate.wait(10)
        cache.make_once(tmp_path / "thing", built.append)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert built == [tmp_path / "thing"]


def test_what_a_killed_process_left_half_made_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "thing"
    folder.mkdir()
    (folder / "half").write_text("stale")
    cache.make_once(folder, lambda folder: None)
    assert not (folder / "half").exists()


def test_a_failed_build_leaves_nothing_and_may_be_repeated(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cache.make_once(tmp_path / "thing", fail)
    assert not (tmp_path / "thing").exists()
    assert cache.make_once(tmp_path / "thing", lambda folder: None).is_dir()


def test_a_finished_thing_that_broke_is_made_anew(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.touch()

    def make() -> Path:
        return cache.make_once(
            tmp_path / "thing",
            lambda folder: (folder / "link").symlink_to(target),
            healthy=lambda folder: (folder / "link").exists(),
        )

    make()
    target.rename(tmp_path / "moved")
    target = tmp_path / "moved"
    assert (make() / "link").exists()


def test_a_cache_that_cannot_be_written_is_told_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHMLANE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(InstallFailed, match="Set SHMLANE_CACHE"):
        managed.isolated_python("nothing", [])


def test_the_cache_lies_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SHMLANE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert managed.cache_root() == Path("/x/shmlane")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert managed.cache_root() == Path("/home/someone/.cache/shmlane")
    monkeypatch.setenv("SHMLANE_CACHE", "/mine")
    assert managed.cache_root() == Path("/mine")


# --- interpreters and environments ----------------------------------------------------


def test_models_get_a_python_with_the_numpy_they_need() -> None:
    python = managed.model_python()
    told = subprocess.run(
        [python, "-c", "import numpy; print(numpy.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == managed.MODEL_NUMPY.partition("==")[2]


@pytest.mark.usefixtures("empty_cache")
def test_an_isolated_python_is_made_once_and_told_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = managed.isolated_python("empty", [], progress_label="making a thing")
    assert "shmlane: making a thing" in capsys.readouterr().err
    assert managed.isolated_python("empty", []) == made
    assert capsys.readouterr().err == ""
    found = subprocess.run(
        [made, "-I", "-c", "import sys; print(sys.prefix)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(found.stdout.strip()) == made.parent.parent


def test_a_package_that_is_not_to_be_had_is_told_with_the_command(
    empty_cache: Path, tmp_path: Path
) -> None:
    missing = str(tmp_path / "no-such-package.whl")
    with pytest.raises(InstallFailed, match=r"install(.|\n)*no-such-package"):
        managed.isolated_python("broken", [missing])
    assert list(empty_cache.glob("python-broken*")) == []


def test_an_environment_made_without_pip_borrows_another_pythons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    script = "echo pip 24.0 from somewhere"
    other = write_program(tmp_path / "python3", script)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    monkeypatch.setattr(sys, "_base_executable", "/no/such/python", raising=False)
    found = interpreters.find_installer()
    assert found.command == (str(other), "-m", "pip")
    assert found.serves_others
    write_program(other, "echo pip 20.3 from somewhere")
    assert not interpreters.find_installer().serves_others


def test_without_pip_uv_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = write_program(tmp_path / "uv", "exit 0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert interpreters.find_installer() == interpreters.Installer(
        (str(uv),), is_uv=True
    )


def test_without_pip_and_uv_both_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "_base_executable", "/no/such/python", raising=False)
    with pytest.raises(InstallFailed, match=r"neither pip nor uv.*SHMLANE_TRITON"):
        interpreters.find_installer()


def test_a_machine_without_a_fitting_python_is_told_what_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = write_program(
        tmp_path / "python3", """echo '{"version": "3.7", "library": null}'"""
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(old))
    monkeypatch.setattr(interpreters, "_SYSTEM_PYTHON", "/no/such/python")
    with pytest.raises(InstallFailed, match=rf"{old}: is Python 3\.7") as caught:
        interpreters.find_model_interpreter()
    assert "libpython" in caught.value.hint


def test_misleading_variables_do_not_reach_other_pythons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    environment = programs.clean_environment()
    assert "PYTHONPATH" not in environment
    assert "PIP_TARGET" not in environment
    assert environment["PATH"] == os.environ["PATH"]
