"""Memory limits of containers, told by control groups of both versions."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmlane import room

MIB = 1 << 20
Container = Callable[..., int]


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Container:
    """The memory that is left where the kernel tells these files, by path and text."""

    def left(cgroup: str, **files: str) -> int:
        for name, text in files.items():
            file = tmp_path / name.replace("__", "/").replace("_dot_", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        told = tmp_path / "cgroup"
        told.write_text(cgroup)
        really_open = builtins.open

        def open_told(path: Any, *args: Any, **options: Any) -> Any:
            if os.fspath(path) == "/proc/self/cgroup":
                path = told
            return really_open(path, *args, **options)

        monkeypatch.setattr(room, "_CGROUPS", str(tmp_path))
        monkeypatch.setattr(builtins, "open", open_told)
        return room._container_memory()

    return left


def test_a_container_leaves_what_it_has_not_used(container: Container) -> None:
    left = container(
        "0::/\n",
        memory_dot_max=f"{64 * MIB}\n",
        memory_dot_current=f"{20 * MIB}\n",
        memory_dot_stat=f"anon {MIB}\ninactive_file {4 * MIB}\n",
    )
    assert left == 48 * MIB


def test_the_tightest_of_all_groups_counts(container: Container) -> None:
    left = container(
        "0::/pod/worker\n",
        pod__worker__memory_dot_max="max\n",
        pod__worker__memory_dot_current=f"{2 * MIB}\n",
        pod__memory_dot_max=f"{10 * MIB}\n",
        pod__memory_dot_current=f"{4 * MIB}\n",
    )
    assert left == 6 * MIB


def test_the_first_version_of_control_groups_is_read_too(container: Container) -> None:
    left = container(
        "9:name=systemd:/\n8:memory:/docker/abc\n7:cpu:/\n",
        memory__memory_dot_limit_in_bytes=f"{32 * MIB}\n",
        memory__memory_dot_usage_in_bytes=f"{8 * MIB}\n",
        memory__memory_dot_stat=f"total_inactive_file {MIB}\n",
    )
    assert left == 25 * MIB


def test_more_used_than_allowed_leaves_nothing(container: Container) -> None:
    left = container("0::/\n", memory_dot_max="10\n", memory_dot_current="20\n")
    assert left == 0


@pytest.mark.parametrize("cgroup", ["", "0::/\n", "0::/elsewhere\n", "8:memory:/\n"])
def test_where_nothing_is_told_nothing_is_limited(
    container: Container, cgroup: str
) -> None:
    assert container(cgroup) == sys.maxsize
