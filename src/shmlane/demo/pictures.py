"""Pictures of the demo: photographs found, a text page drawn, pixels put into tensors.

Owns decoding, drawing and normalising. Writes pixels straight into the array it is
given, plane by plane; the channels-first picture never exists anywhere else. Needs
OpenCV; photographs come from packages that are installed, never from a network.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from shmlane.errors import ExtraMissing, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shmlane.demo.textboxes import TextBox

    Picture = NDArray[np.uint8]

# Photographs that packages carry, by package; only the first is asked for by an extra.
_PHOTOGRAPHS = (
    ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
    ("sklearn", "datasets/images/china.jpg"),
    ("sklearn", "datasets/images/flower.jpg"),
    ("skimage", "data/chelsea.png"),
    ("skimage", "data/coffee.png"),
    ("skimage", "data/rocket.jpg"),
)

PAGE_SIDE = 1280
# Text, x, baseline y, scale and thickness of every line on the page.
_PAGE_LINES = (
    ("Tensors through shared memory", 80, 150, 2.1, 4),
    ("Data is written once, in place, where the", 80, 270, 1.5, 3),
    ("server reads it. Results are read where the", 80, 350, 1.5, 3),
    ("server wrote them. A few hundred bytes", 80, 430, 1.5, 3),
    ("per request cross a socket.", 80, 510, 1.5, 3),
    ("Grace Hopper made the", 600, 670, 1.4, 3),
    ("first compiler in 1952", 600, 750, 1.4, 3),
    ("and gave her listeners", 600, 830, 1.4, 3),
    ("nanoseconds: wires as", 600, 910, 1.4, 3),
    ("long as light travels", 600, 990, 1.4, 3),
    ("in that time, 30 cm.", 600, 1070, 1.4, 3),
)
# Left, top and width of the portrait; the lower part of the photograph is left out.
_PORTRAIT = (80, 648, 480)
_PORTRAIT_PART = 0.72
_FONT = cv2.FONT_HERSHEY_SIMPLEX
_INK = (40, 30, 20)


@dataclass(frozen=True, slots=True, eq=False)
class Photograph:
    """A decoded photograph: `pixels` is height x width x 3, blue first."""

    name: str
    pixels: Picture


@dataclass(frozen=True, slots=True)
class TextLine:
    """One line of the page and the rectangle its letters stand in."""

    text: str
    x: int
    y: int
    width: int
    height: int


def photographs(*, limit: int = 3) -> list[Photograph]:
    """The first photographs that installed packages ship, at least one."""
    found: list[Photograph] = []
    for package, inner in _PHOTOGRAPHS:
        path = _package_file(package, inner)
        pixels = cv2.imread(str(path)) if path is not None else None
        if pixels is not None and len(found) < limit:
            found.append(Photograph(Path(inner).stem, _bytes(pixels)))
    if not found:
        raise ExtraMissing(
            "no installed package ships a photograph for the demo.",
            hint="Install one that does: pip install 'shmlane[bench]'",
        )
    return found


def _package_file(package: str, inner: str) -> Path | None:
    """Where an installed package keeps a file, found without importing it."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / inner
    return path if path.is_file() else None


def _bytes(pixels: Any) -> Picture:
    return np.asarray(pixels, np.uint8)


def text_page(portrait: Picture) -> tuple[Picture, list[TextLine]]:
    """A square page of text lines with a photograph in it, and where the lines are."""
    page = np.full((PAGE_SIDE, PAGE_SIDE, 3), 250, np.uint8)
    lines = []
    for text, x, baseline, scale, thickness in _PAGE_LINES:
        (width, height), below = cv2.getTextSize(text, _FONT, scale, thickness)
        cv2.putText(
            page, text, (x, baseline), _FONT, scale, _INK, thickness, cv2.LINE_AA
        )
        lines.append(TextLine(text, x, baseline - height, width, height + below // 2))
    portrait = portrait[: int(portrait.shape[0] * _PORTRAIT_PART)]
    x, y, width = _PORTRAIT
    height = width * portrait.shape[0] // portrait.shape[1]
    page[y : y + height, x : x + width] = resized(portrait, width, height)
    return page, lines


def resized(picture: Picture, width: int, height: int) -> Picture:
    """The picture at another size, averaged over the pixels that fall together."""
    return _bytes(cv2.resize(picture, (width, height), interpolation=cv2.INTER_AREA))


def planes_into(
    view: NDArray[np.float32],
    picture: Picture,
    *,
    mean: Sequence[float],
    deviation: Sequence[float],
) -> None:
    """Write a picture into a channels-first view as (pixel / 255 - mean) / deviation.

    `view` is channels x height x width; the picture is resized to it. Channels keep
    the order of the picture. Each plane goes from bytes to its place in one pass.
    """
    channels, height, width = view.shape
    planes = cv2.split(resized(picture, width, height))
    if len(planes) != channels:
        raise UsageError(
            f"the picture has {len(planes)} channels and the tensor {channels}."
        )
    for plane, out, centre, spread in zip(planes, view, mean, deviation, strict=True):
        np.multiply(plane, np.float32(1 / (255 * spread)), out=out)
        np.subtract(out, np.float32(centre / spread), out=out)


def with_boxes(picture: Picture, boxes: Sequence[TextBox]) -> Picture:
    """A copy of the picture with every box outlined."""
    drawn = picture.copy()
    outlines = [box.corners.round().astype(np.int32) for box in boxes]
    cv2.polylines(drawn, outlines, True, (60, 60, 230), 3, cv2.LINE_AA)
    return drawn


def save_png(path: Path, picture: Picture) -> None:
    """Write a PNG file; an error names the path."""
    done, encoded = cv2.imencode(".png", picture)
    if not done:
        raise UsageError(f"OpenCV could not encode the picture for {path}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded.tobytes())
    except OSError as error:
        raise UsageError(
            f"the picture cannot be written to {path}: {error.strerror}.",
            hint="Choose another folder.",
            path=str(path),
        ) from error


def lines_found(lines: Sequence[TextLine], boxes: Sequence[TextBox]) -> int:
    """How many lines are covered by boxes over most of their area."""
    covered = np.zeros((PAGE_SIDE, PAGE_SIDE), np.uint8)
    for box in boxes:
        cv2.fillPoly(covered, [box.corners.round().astype(np.int32)], [1.0])
    areas = (covered[n.y : n.y + n.height, n.x : n.x + n.width] for n in lines)
    return sum(bool(area.mean() > 0.7) for area in areas)
