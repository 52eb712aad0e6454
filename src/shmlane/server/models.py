"""The demo models: `sink` and `identity`, in C where a compiler is, else in Python.

Owns their model repositories in the cache and the backend built from `native/echo.c`,
which lies in each model's own folder so that any tritonserver finds it. Networks with
weights come from `networks`. Refuses to fail for want of a compiler: the models are
Python ones then, slower, with a notice.
"""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from shmlane.errors import UsageError
from shmlane.server.cache import cache_root, make_once, say
from shmlane.server.health import CHECK_MODEL

ECHO_MODELS = ("sink", "identity")
NETWORKS = ("resnet50", "ocr_det", "ocr_rec")

_NATIVE = Path(__file__).with_name("native")
_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_FLAGS = ("-O2", "-fPIC", "-shared", "-std=gnu11")
_COMPILE_TIMEOUT = 120.0
_LIBRARY = "libtriton_shmlane_echo.so"

_ECHO_CONFIG = """\
name: "{name}"
backend: "{backend}"
max_batch_size: 0
input [{{ name: "INPUT__0" data_type: TYPE_FP32 dims: [ -1, -1, -1, -1 ] }}]
output [{{ name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ {output_dims} ] }}]
instance_group [{{ kind: KIND_CPU count: {instances} }}]
"""
_OUTPUT_DIMS = {"sink": "1", "identity": "-1, -1, -1, -1"}
_CHECK_CONFIG = f"""\
name: "{CHECK_MODEL}"
backend: "python"
max_batch_size: 0
input [{{ name: "INPUT" data_type: TYPE_FP32 dims: [ -1 ] }}]
output [{{ name: "OUTPUT" data_type: TYPE_FP32 dims: [ -1 ] }}]
instance_group [{{ kind: KIND_CPU count: 1 }}]
"""


def demo_models(*names: str) -> list[Path]:
    """Model repositories that serve the named demo models, ready for `TritonServer`.

    `sink` answers with the last element of INPUT__0, `identity` with all of it (FP32,
    four dimensions); `resnet50`, `ocr_det` and `ocr_rec` are real networks, which find
    and read text. Made on first use.
    """
    known = (*ECHO_MODELS, *NETWORKS)
    if unknown := [name for name in names if name not in known]:
        raise UsageError(
            f"there is no demo model {unknown[0]!r}.",
            hint=f"The demo models are {', '.join(known)}.",
            name=unknown[0],
        )
    return [_repository(name) for name in dict.fromkeys(names)]


def check_repository() -> Path:
    """A repository with one Python model that returns what the server handed it."""
    return _python_repository(CHECK_MODEL, _CHECK_CONFIG)


def serves_python(repositories: Sequence[Path]) -> bool:
    """Whether any model in these repositories runs in Triton's Python backend."""
    return any(
        _is_python(model)
        for repository in repositories
        for model in repository.iterdir()
        if model.is_dir()
    )


def _is_python(model: Path) -> bool:
    config = model / "config.pbtxt"
    text = config.read_text() if config.exists() else ""
    if stated := re.search(r'^\s*backend\s*:\s*"([^"]*)"', text, re.MULTILINE):
        return stated[1] == "python"
    return any(model.glob("*/model.py"))


def _repository(name: str) -> Path:
    if name in NETWORKS:
        from shmlane.server import networks

        return networks.repository(name)
    dims = _OUTPUT_DIMS[name]
    library = _compiled()
    if isinstance(library, Path):
        config = _ECHO_CONFIG.format(
            name=name, backend="shmlane_echo", output_dims=dims, instances=4
        )
        return _write(name, config, {_LIBRARY: library.read_bytes()})
    say(f"{library}: the demo model {name} is served in Python, which is slower")
    config = _ECHO_CONFIG.format(
        name=name, backend="python", output_dims=dims, instances=2
    )
    return _python_repository(name, config)


def _python_repository(name: str, config: str) -> Path:
    program = (_NATIVE / "echo_model.py").read_bytes()
    return _write(name, config, {"1/model.py": program})


def _write(name: str, config: str, files: Mapping[str, bytes]) -> Path:
    """A repository of one model. Its name carries its content: it never changes."""
    content = {"config.pbtxt": config.encode(), **files}
    key = _digest(*(part for item in content.items() for part in item))

    def build(folder: Path) -> None:
        (folder / name / "1").mkdir(parents=True)
        for path, data in content.items():
            (folder / name / path).write_bytes(data)

    return make_once(cache_root() / f"model-{name}-{key}", build)


def _compiled() -> Path | str:
    """The backend built for this machine, or in words why it cannot be."""
    source = _NATIVE / "echo.c"
    key = _digest(source.read_bytes(), *_COMPILE_FLAGS, platform.machine())
    folder = cache_root() / f"backend-echo-{key}"
    if (folder / _LIBRARY).exists():
        return folder / _LIBRARY
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        return "no C compiler is on PATH"

    def build(folder: Path) -> None:
        command = [compiler, str(source), *_COMPILE_FLAGS, "-o", str(folder / _LIBRARY)]
        subprocess.run(
            command, capture_output=True, check=True, timeout=_COMPILE_TIMEOUT
        )

    try:
        return make_once(folder, build) / _LIBRARY
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error).encode()
        first = output.decode(errors="replace").strip().partition("\n")[0]
        return f"{compiler} cannot build the demo backend ({first})"


def _digest(*parts: str | bytes) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.encode() if isinstance(part, str) else part)
        whole.update(b"\0")
    return whole.hexdigest()[:12]
