"""The real networks: made once, served, and equal to onnxruntime without a server."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shmlane.errors import UsageError
from shmlane.server import TritonServer, networks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

NAMES = ("resnet50", "ocr_det")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    repositories = [networks.repository(name) for name in NAMES]
    with TritonServer(model_repository=repositories) as server:
        yield server.http_url


def infer(url: str, name: str, given: NDArray[np.float32]) -> NDArray[np.float32]:
    """One request with the tensors on the wire, by the protocol's binary extension."""
    wanted = networks.network(name)
    tensor = {
        "name": wanted.input,
        "datatype": "FP32",
        "shape": given.shape,
        "parameters": {"binary_data_size": given.nbytes},
    }
    asked = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    header = json.dumps(asked).encode()
    request = urllib.request.Request(
        f"http://{url.removeprefix('http://')}/v2/models/{name}/infer",
        data=header + given.tobytes(),
        headers={
            "Inference-Header-Content-Length": str(len(header)),
            # What urllib says by default, a form, crashes tritonserver 2.51.
            "Content-Type": "application/octet-stream",
        },
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        length = int(reply.headers["Inference-Header-Content-Length"])
        answered, content = json.loads(reply.read(length)), reply.read()
    shape = answered["outputs"][0]["shape"]
    return np.frombuffer(content, np.float32).reshape(shape)


def pixels(name: str, *, batch: int) -> NDArray[np.float32]:
    random = np.random.default_rng(7)
    shape = (batch, *networks.network(name).input_dims)
    return random.standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_the_server_answers_as_onnxruntime_does(url: str, name: str) -> None:
    given = pixels(name, batch=2)
    found = infer(url, name, given)
    assert found.shape == (2, *networks.network(name).output_dims)
    np.testing.assert_allclose(found, networks.reference(name, given), atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_its_batch(url: str, name: str) -> None:
    given = pixels(name, batch=4)
    alone = infer(url, name, given[:1])
    together = infer(url, name, given)
    np.testing.assert_allclose(alone[0], together[0], atol=1e-6)
    assert np.abs(together[1] - together[0]).max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_a_repository_is_made_once(name: str) -> None:
    first = networks.repository(name)
    made = (first / name / "1" / "model.onnx").stat()
    assert networks.repository(name) == first
    again = (first / name / "1" / "model.onnx").stat()
    assert (again.st_ino, again.st_mtime_ns) == (made.st_ino, made.st_mtime_ns)


def test_a_repository_holds_one_model_and_nothing_half_made() -> None:
    for name in NAMES:
        target = networks.repository(name)
        assert [entry.name for entry in target.iterdir()] == [name]
    folder = networks.repository(NAMES[0]).parent
    assert not [entry for entry in folder.iterdir() if entry.name.startswith("tmp")]


def test_an_unknown_network_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="'vgg'; there are resnet50, ocr_det"):
        networks.repository("vgg")
