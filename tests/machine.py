"""What tests need of the machine: processes, programs and folders of models."""

from __future__ import annotations

import contextlib
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def children(pid: int) -> list[int]:
    """The processes that any thread of a process started."""
    listed = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        # One may end in between.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            listed.append((thread / "children").read_text())
    return [int(child) for child in " ".join(listed).split()]


def descendants(pid: int) -> set[int]:
    """All processes that a process started, and those that they did."""
    found: set[int] = set()
    # It may end in between.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        found.update(children(pid))
    return found.union(*map(descendants, found))


def parent(pid: int) -> int:
    """The process that started another."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def write_model(repository: Path, *, config: str, name: str = "model") -> Path:
    """Put a model that is only a config into a repository."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(f'name: "{name}"\n{config}')
    return repository


def write_program(path: Path, script: str) -> Path:
    """An executable of one's own, in sh."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path
