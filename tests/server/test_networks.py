"""The real networks: made once, served, and equal to onnxruntime without a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from shmlane import Session, UsageError
from shmlane.errors import InstallFailed
from shmlane.server import TritonServer, networks

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Name and the shapes of one input and its output, batch aside.
SHAPES = {
    "resnet50": ((3, 224, 224), (1000,)),
    "ocr_det": ((3, 640, 640), (1, 640, 640)),
    "ocr_rec": ((3, 48, 320), (40, 6625)),
}
NAMES = tuple(SHAPES)


def ask(
    server: TritonServer, name: str, *batches: NDArray[np.float32]
) -> list[NDArray[np.float32]]:
    """What the server's network answers to each batch."""
    wanted = networks.network(name)
    with Session(server.http_url, name, slots=1) as session:
        return [
            session.infer({wanted.input: batch})[wanted.output] for batch in batches
        ]


def pixels(name: str, *, batch: int) -> NDArray[np.float32]:
    random = np.random.default_rng(7)
    shape, _ = SHAPES[name]
    return random.standard_normal((batch, *shape), dtype=np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_the_server_answers_as_onnxruntime_does(
    networks_server: TritonServer, name: str
) -> None:
    given = pixels(name, batch=2)
    (found,) = ask(networks_server, name, given)
    assert found.shape == (2, *SHAPES[name][1])
    np.testing.assert_allclose(found, networks.reference(name, given), atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_its_batch(
    networks_server: TritonServer, name: str
) -> None:
    given = pixels(name, batch=4)
    alone, together = ask(networks_server, name, given[:1], given)
    np.testing.assert_allclose(alone[0], together[0], atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_other_pixels_give_another_answer(
    networks_server: TritonServer, name: str
) -> None:
    first, second = pixels(name, batch=2)
    found = ask(networks_server, name, first[None], second[None])
    assert np.abs(found[0] - found[1]).max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_a_repository_is_made_once(name: str) -> None:
    first = networks.repository(name)
    made = (first / name / "1" / "model.onnx").stat()
    assert networks.repository(name) == first
    again = (first / name / "1" / "model.onnx").stat()
    assert (again.st_ino, again.st_mtime_ns) == (made.st_ino, made.st_mtime_ns)


@pytest.mark.parametrize("name", NAMES)
def test_a_repository_holds_one_model(name: str) -> None:
    assert [entry.name for entry in networks.repository(name).iterdir()] == [name]


def test_an_unknown_network_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'vgg'.*resnet50, ocr_det"):
        networks.repository("vgg")


def test_the_characters_are_those_of_the_classes() -> None:
    known = networks.characters()
    assert len(known) == SHAPES["ocr_rec"][1][-1]
    assert (known[0], known[-1]) == ("", " ")
    assert all(len(character) == 1 for character in known[1:])
    assert set("aAzZ019書?") <= set(known)


def test_pixels_that_no_network_takes_fail_with_the_reason() -> None:
    with pytest.raises(InstallFailed, match=r"reference\.py ended with exit code 1"):
        networks.reference("resnet50", np.zeros((1, 3, 7, 7), np.float32))
