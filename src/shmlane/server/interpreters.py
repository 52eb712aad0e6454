"""Interpreters, virtual environments and packages for programs that shmlane starts.

Owns the choice of a Python that can run Triton's models and of the tool that installs
packages (the running Python's pip, uv, or another Python's pip, in this order), so that
it works in environments made without pip. Refuses to install into the running
environment: everything goes into a folder that the caller names.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from shmlane.errors import InstallFailed
from shmlane.server.programs import run_program, what_it_prints

# The wheel has stubs for 3.8 to 3.13; the last NumPy before 2 has wheels to 3.12.
MODEL_VERSIONS = ("3.12", "3.11", "3.10", "3.9")

_SYSTEM_PYTHON = "/usr/bin/python3"
_INSTALL_TIMEOUT = 900.0
_PROBE_TIMEOUT = 20.0
_PIP_SERVES_OTHERS = (22, 3)

# An interpreter linked with libpython finds it by its own run path; a program that
# embeds Python does not, so the file itself is looked for and not what is loaded here.
_PROBE = """
import ctypes.util, json, os, sys, sysconfig, venv
version = "%d.%d" % sys.version_info[:2]
name = "libpython" + version + ".so.1.0"
folders = [sysconfig.get_config_var("LIBDIR") or "", sys.base_prefix + "/lib"]
paths = [os.path.join(folder, name) for folder in folders]
library = next((path for path in paths if os.path.exists(path)), None)
if library is None and ctypes.util.find_library("python" + version):
    library = name
print(json.dumps({"version": version, "library": library}))
"""


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """A Python that can be embedded: its version and where its library lies.

    `library` is a bare file name when the loader finds it without help.
    """

    executable: str
    version: str
    library: str


def find_model_interpreter() -> Interpreter:
    """A Python for models: the running one where possible, else one on PATH."""
    refused = []
    for executable in _candidates():
        found = _examine(executable)
        if isinstance(found, Interpreter):
            return found
        refused.append(f"{executable}: {found}")
    raise InstallFailed(
        "no Python for Triton's models was found. Looked at "
        + ("; ".join(refused) or "nothing: no python3 is on PATH")
        + ".",
        hint=f"Install one of Python {', '.join(MODEL_VERSIONS)} with its shared "
        "library (on Debian: apt install python3 python3-venv libpython3-dev).",
        refused=refused,
    )


def _candidates() -> Iterator[str]:
    names = [sys.executable, *(f"python{v}" for v in MODEL_VERSIONS), "python3"]
    seen = set()
    for name in [*names, _SYSTEM_PYTHON]:
        path = shutil.which(name) if name else None
        if path and path not in seen:
            seen.add(path)
            yield path


def _examine(executable: str) -> Interpreter | str:
    """The interpreter, or in words why it will not do."""
    command = (executable, "-I", "-c", _PROBE)
    try:
        facts = json.loads(what_it_prints(command, timeout=_PROBE_TIMEOUT))
    except ValueError:
        return "does not run, or lacks the venv module"
    if facts["version"] not in MODEL_VERSIONS:
        return f"is Python {facts['version']}"
    if not facts["library"]:
        return f"has no libpython{facts['version']}.so.1.0"
    return Interpreter(executable, facts["version"], facts["library"])


@dataclasses.dataclass(frozen=True)
class Installer:
    """pip or uv, as a command to put arguments behind.

    `serves_others` tells whether it installs into an environment other than its own.
    """

    command: tuple[str, ...]
    is_uv: bool = False
    serves_others: bool = True


def find_installer() -> Installer:
    """The tool that installs packages: own pip, uv, or the pip of another Python."""
    if importlib.util.find_spec("pip"):
        return _examine_pip(sys.executable) or Installer((sys.executable, "-m", "pip"))
    if uv := shutil.which("uv"):
        return Installer((uv,), is_uv=True)
    others = [getattr(sys, "_base_executable", ""), *_candidates()]
    for executable in filter(None, others):
        if found := _examine_pip(executable):
            return found
    raise InstallFailed(
        f"neither pip nor uv was found: {sys.executable} has no pip, uv is not on "
        "PATH, and no other Python there has pip.",
        hint="Install one (uv pip install pip, or python -m ensurepip), or set "
        "SHMLANE_TRITONSERVER to a tritonserver that is installed already.",
    )


def _examine_pip(python: str) -> Installer | None:
    command = (python, "-m", "pip")
    answer = what_it_prints((*command, "--version"), timeout=_PROBE_TIMEOUT)
    version = re.match(r"pip (\d+)\.(\d+)", answer)
    if not version:
        return None
    known = (int(version[1]), int(version[2]))
    return Installer(command, serves_others=known >= _PIP_SERVES_OTHERS)


def make_environment(folder: Path, packages: Sequence[str], *, python: str) -> None:
    """Make a virtual environment of `python` in `folder` and install `packages`."""
    installer = find_installer()
    if installer.is_uv:
        venv = (*installer.command, "venv", "--clear", "--python", python)
        _install([*venv, str(folder)])
    elif installer.serves_others:
        # Debian's python3 has no ensurepip unless asked for, so no pip inside.
        _install([python, "-m", "venv", "--without-pip", str(folder)])
    else:
        _install([python, "-m", "venv", str(folder)])
    install_packages(environment_python(folder), packages)


def install_packages(python: Path, packages: Sequence[str]) -> None:
    """Add packages to the environment whose interpreter is `python`."""
    if not packages:
        return
    installer = find_installer()
    if installer.is_uv:
        command = [*installer.command, "pip", "install", "--python", str(python)]
    elif installer.serves_others:
        command = [*installer.command, "--python", str(python), "install"]
    else:
        command = [str(python), "-m", "pip", "install"]
    _install([*command, "--quiet", *packages])


def install_folder(folder: Path, package: str) -> None:
    """Unpack one package, without what it depends on, into `folder`."""
    installer = find_installer()
    command = [*installer.command, "install"]
    if installer.is_uv:
        command = [*installer.command, "pip", "install", "--python", sys.executable]
    _install([*command, "--quiet", "--no-deps", "--target", str(folder), package])


def environment_python(folder: Path) -> Path:
    """The interpreter of the virtual environment in `folder`."""
    return folder / "bin" / "python"


def _install(command: Sequence[str]) -> None:
    run_program(
        command,
        name=f"`{' '.join(command)}`",
        timeout=_INSTALL_TIMEOUT,
        if_slow="Check the connection to the package index and try again.",
        if_failed="Run that command by hand to see more.",
    )
