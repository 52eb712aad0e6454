"""The tritonserver to run, and the Python its models run in.

Owns the search for an installed server (`SHMLANE_TRITONSERVER`, PATH, the place of
NVIDIA's images) and, where there is none, the one kept in the cache: a wheel that
carries the server, unpacked without its dependencies, beside a virtual environment for
models written in Python. Both are made on first use. Refuses to guess: a path set by
the user that does not lead to a server is an error, not a reason to look elsewhere.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from shmlane.errors import InstallFailed, UnsupportedPlatform, UsageError
from shmlane.server.cache import cache_root, locked, make_once, progress
from shmlane.server.interpreters import (
    environment_python,
    find_model_interpreter,
    install_folder,
    install_packages,
    make_environment,
)
from shmlane.server.programs import clean_environment

__all__ = [
    "Installation",
    "cache_root",
    "describe",
    "find_installation",
    "isolated_python",
    "model_python",
]

WHEEL = "nvidia-pytriton==0.7.0"
WHEEL_SERVER_VERSION = "2.51.0"
# With NumPy 2 this server's Python backend hands models wrong data, without an error.
MODEL_NUMPY = "numpy==1.26.4"

_IMAGE_PATH = Path("/opt/tritonserver/bin/tritonserver")
_INTERPRETER_FACTS = "interpreter.json"
_PACKAGES = "packages.json"


@dataclasses.dataclass(frozen=True)
class Installation:
    """A tritonserver executable; `is_managed` when it is the one in the cache."""

    executable: Path
    is_managed: bool

    def arguments(self, *, python_models: bool) -> list[str]:
        """What this server must be told to find its Python backend."""
        if not (self.is_managed and python_models):
            return []
        return [f"--backend-directory={_python_backend(self.executable)}"]

    def environment(self, *, python_models: bool) -> dict[str, str]:
        """The environment to start it in."""
        environment = clean_environment()
        if self.is_managed and python_models:
            # The backend takes the first python3 on PATH for the models' home.
            _prepend(environment, "PATH", model_python().parent)
            library = _python_backend(self.executable) / "lib"
            _prepend(environment, "LD_LIBRARY_PATH", library)
        return environment

    def python_state(self) -> str | None:
        """Changes with all that decides what Python models get; None if unknown."""
        if not self.is_managed:
            return None
        models = model_python().parent.parent
        numpy = sorted(each.name for each in models.glob("lib/*/*/numpy-*"))
        facts = (models / _INTERPRETER_FACTS).read_text()
        state = "\n".join([WHEEL, facts, *numpy])
        return hashlib.sha256(state.encode()).hexdigest()[:12]


def find_installation() -> Installation:
    """The server to use; makes the managed one if nothing else is installed."""
    if found := _installed():
        return Installation(found, is_managed=False)
    return Installation(_managed_server(), is_managed=True)


def describe() -> str:
    """In words, the server that would be used; installs nothing."""
    if found := _installed():
        return str(found)
    return f"{WHEEL_SERVER_VERSION} of {WHEEL}, kept in {cache_root()}"


def _installed() -> Path | None:
    if chosen := os.environ.get("SHMLANE_TRITONSERVER"):
        return _checked(Path(chosen))
    if on_path := shutil.which("tritonserver"):
        return Path(on_path)
    return _IMAGE_PATH if os.access(_IMAGE_PATH, os.X_OK) else None


def model_python(*, packages: Sequence[str] = ()) -> Path:
    """The interpreter of the models' environment, with `packages` installed.

    The environment is shared by all models of the managed server. It is kept on a
    NumPy that this server's Python backend works with, whatever the packages ask for.
    """
    folder = make_once(
        cache_root() / "models-python",
        _build_models_environment,
        label="preparing a Python for Triton's models",
        healthy=lambda folder: environment_python(folder).exists(),
    )
    _ensure_packages(folder, packages)
    return environment_python(folder)


def isolated_python(
    name: str, packages: Sequence[str], *, progress_label: str | None = None
) -> Path:
    """The interpreter of an environment of its own with exactly these packages.

    Made in the cache on first use, with progress lines named `progress_label`; other
    packages or another version of Python make another environment.
    """
    version = "{}.{}".format(*sys.version_info[:2])
    key = hashlib.sha256("\n".join([version, *sorted(packages)]).encode()).hexdigest()
    folder = make_once(
        cache_root() / f"python-{name}-{key[:12]}",
        lambda folder: make_environment(folder, packages, python=sys.executable),
        label=progress_label or f"installing {', '.join(packages)}",
        healthy=lambda folder: environment_python(folder).exists(),
    )
    return environment_python(folder)


def _checked(executable: Path) -> Path:
    if executable.is_file() and os.access(executable, os.X_OK):
        return executable.absolute()
    reason = "is not executable" if executable.exists() else "does not exist"
    raise UsageError(
        f"SHMLANE_TRITONSERVER names {executable}, which {reason}.",
        hint="Set it to a tritonserver executable, or unset it to have one installed.",
        path=str(executable),
    )


def _managed_server() -> Path:
    if sys.platform != "linux":
        raise UnsupportedPlatform(
            f"there is no tritonserver to install on {sys.platform}.",
            hint="Start one on Linux and pass its address.",
        )
    folder = make_once(
        cache_root() / WHEEL.replace("==", "-"),
        lambda folder: install_folder(folder, WHEEL),
        label=f"installing tritonserver {WHEEL_SERVER_VERSION} (55 MB download)",
    )
    executable = folder / "pytriton" / "tritonserver" / "bin" / "tritonserver"
    if not executable.exists():
        raise InstallFailed(
            f"{WHEEL} was installed, but {executable} is not in it.",
            hint=f"Remove {folder} and try again.",
        )
    return executable


def _build_models_environment(folder: Path) -> None:
    interpreter = find_model_interpreter()
    make_environment(folder, [MODEL_NUMPY], python=interpreter.executable)
    facts = dataclasses.asdict(interpreter)
    (folder / _INTERPRETER_FACTS).write_text(json.dumps(facts))
    (folder / _PACKAGES).write_text("[]")


def _ensure_packages(folder: Path, packages: Sequence[str]) -> None:
    record = folder / _PACKAGES
    if set(packages) <= set(json.loads(record.read_text())):
        return
    with locked(folder):
        present = json.loads(record.read_text())
        missing = [package for package in packages if package not in present]
        if missing:
            with progress(f"installing {', '.join(missing)} for Triton's models"):
                install_packages(environment_python(folder), [MODEL_NUMPY, *missing])
            fresh = record.with_suffix(".new")
            fresh.write_text(json.dumps([*present, *missing]))
            fresh.replace(record)


def _python_backend(executable: Path) -> Path:
    """A backend folder of links into the wheel, for the version of the models' Python.

    Links and not copies: the libraries find their neighbours by where they lie.
    """
    models = model_python().parent.parent
    facts = json.loads((models / _INTERPRETER_FACTS).read_text())
    version, library = facts["version"], Path(facts["library"])
    home = executable.parent.parent
    stub = home / "python_backend_stubs" / version / "triton_python_backend_stub"

    def build(folder: Path) -> None:
        (folder / "python").mkdir()
        for source in [*(home / "backends" / "python").glob("*.*"), stub]:
            (folder / "python" / source.name).symlink_to(source)
        (folder / "lib").mkdir()
        if library.is_absolute():
            (folder / "lib" / library.name).symlink_to(library)

    def healthy(folder: Path) -> bool:
        return all(link.exists() for link in (folder / "lib").iterdir())

    name = f"{WHEEL.replace('==', '-')}-backends-{version}"
    return make_once(cache_root() / name, build, healthy=healthy)


def _prepend(environment: dict[str, str], name: str, folder: Path) -> None:
    rest = environment.get(name)
    environment[name] = f"{folder}{os.pathsep}{rest}" if rest else str(folder)
