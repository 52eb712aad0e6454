"""Read the text in a picture: two networks in Triton, pixels through shared memory.

    python examples/ocr.py                      # draws a page and reads it
    python examples/ocr.py scan.jpg --marked found.png
    python examples/ocr.py scan.jpg --url localhost:8000 --json

Owns the way from pixels to text with PP-OCRv4: `ocr_det` marks where text is, `ocr_rec`
reads line by line. No two pictures and no two lines have one size, so every request has
a shape of its own. Without --url it starts a tritonserver with both networks, which are
downloaded on first use; `shmlane serve --demo ocr_det --demo ocr_rec` serves them too.
Refuses to turn pages: text may be slanted or run upwards, but not stand on its head.

Needs OpenCV: pip install 'shmlane[preprocess]'
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import cv2
except ImportError as error:
    sys.exit(f"This needs OpenCV ({error}): pip install 'shmlane[preprocess]'")
import numpy as np
from numpy.typing import NDArray

import shmlane
from shmlane.demo.textboxes import find_text_boxes
from shmlane.preprocess import Letterbox, letterbox_into, resize_into, stack_into
from shmlane.server import TritonServer, demo_models
from shmlane.server.networks import characters

Array = NDArray[Any]

# What the networks call their tensors; both take pixels as (value / 255 - 0.5) / 0.5.
PIXELS, MARKED, READ = "x", "sigmoid_0.tmp_0", "softmax_11.tmp_0"
MEAN = STD = 0.5
# The detector halves the picture five times, the reader looks at eight columns at once.
LARGEST_PAGE, PAGE_STEP = 960, 32
LINE_HEIGHT, NARROWEST_LINE, WIDEST_LINE, LINE_STEP = 48, 320, 1600, 32
COLUMNS_READ, CLASSES = 8, 6625
LINES_AT_ONCE = 4
LEAST_SCORE = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """One line of text; corners: four (x, y), clockwise from the upper left one."""

    text: str
    score: float
    corners: Array


def read_text(url: str, page: Array) -> list[Line]:
    """The lines of a picture (height, width, blue-green-red), from top to bottom."""
    with open_detector(url) as detector, open_reader(url) as reader:
        corners = find_lines(detector, page)
        cuts = [cut_line(page, each) for each in corners]
        read = read_lines(reader, cuts)
    lines = [
        Line(text, score, each)
        for (text, score), each in zip(read, corners, strict=True)
    ]
    return [line for line in lines if line.text and line.score >= LEAST_SCORE]


# --- where the text is ----------------------------------------------------------------


def open_detector(url: str) -> shmlane.Session:
    """A session with room for the largest page; smaller ones use a part of it."""
    largest = (LARGEST_PAGE, LARGEST_PAGE)
    return shmlane.Session(
        url,
        "ocr_det",
        slots=1,
        shapes={PIXELS: (1, 3, *largest)},
        outputs={MARKED: (1, 1, *largest)},
    )


def find_lines(detector: shmlane.Session, page: Array) -> list[Array]:
    """Corners of every line of text, in pixels of the page."""
    with detector.lease() as lease:
        placed = write_page(lease, page)
        # Wide enough for commas, which hang below what the detector marks.
        boxes = find_text_boxes(lease.infer()[MARKED][0, 0], expand=2.0)
    # A box is two points, left top and right bottom: four points are two boxes.
    return [placed.boxes_back(box.corners.reshape(2, 4)).reshape(4, 2) for box in boxes]


def write_page(lease: shmlane.Lease, page: Array) -> Letterbox:
    """The whole page, made smaller where it is too large."""
    scale = min(1.0, LARGEST_PAGE / max(page.shape[:2]))
    height, width = (
        PAGE_STEP * math.ceil(side * scale / PAGE_STEP) for side in page.shape[:2]
    )
    view = lease.view(PIXELS, (1, 3, height, width))
    return letterbox_into(view, page, interpolation="area", mean=MEAN, std=STD)


def cut_line(page: Array, corners: Array) -> Array:
    """What lies between the corners, set upright."""
    width = max(1, math.ceil(math.dist(corners[0], corners[1])))
    height = max(1, math.ceil(math.dist(corners[0], corners[3])))
    upright = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    turn = cv2.getPerspectiveTransform(corners, upright)
    cut = cv2.warpPerspective(
        page, turn, (width, height), borderMode=cv2.BORDER_REPLICATE
    )
    # Text that runs upwards, as along the axis of a diagram.
    return np.rot90(cut, -1) if height > 1.5 * width else cut


# --- what it says ---------------------------------------------------------------------


def open_reader(url: str) -> shmlane.Session:
    """A session with room for as many lines as are read at once, of the widest kind."""
    columns = WIDEST_LINE // COLUMNS_READ
    return shmlane.Session(
        url,
        "ocr_rec",
        slots=2,
        shapes={PIXELS: (LINES_AT_ONCE, 3, LINE_HEIGHT, WIDEST_LINE)},
        outputs={READ: (LINES_AT_ONCE, columns, CLASSES)},
    )


def read_lines(
    reader: shmlane.Session, cuts: Sequence[Array]
) -> list[tuple[str, float]]:
    """Text and score of each picture of a line, in their order."""
    known = characters()
    found: dict[int, tuple[str, float]] = {}

    def write(lease: shmlane.Lease, batch: list[int]) -> None:
        write_lines(lease, [cuts[index] for index in batch])

    def read(batch: list[int], result: shmlane.Result) -> None:
        for index, row in zip(batch, result[READ], strict=True):
            found[index] = decode(row, known)

    # One batch is cut and another decoded while the network reads a third.
    for _ in reader.stream(batches(cuts), write=write, read=read):
        pass
    return [found[index] for index in range(len(cuts))]


def batches(cuts: Sequence[Array]) -> list[list[int]]:
    """Numbers of lines of about the same width, which waste little room together."""
    order = sorted(range(len(cuts)), key=lambda index: line_width(cuts[index]))
    starts = range(0, len(order), LINES_AT_ONCE)
    return [order[start : start + LINES_AT_ONCE] for start in starts]


def write_lines(lease: shmlane.Lease, cuts: Sequence[Array]) -> None:
    """All lines as one batch, as wide as the widest of them."""
    widest = max(NARROWEST_LINE, *map(line_width, cuts))
    width = LINE_STEP * math.ceil(widest / LINE_STEP)
    view = lease.view(PIXELS, (len(cuts), 3, LINE_HEIGHT, width))
    stack_into(view, cuts, write=write_line)


def write_line(row: Array, cut: Array) -> None:
    """One line at the left of its row, and nothing behind it."""
    width = line_width(cut)
    resize_into(row[..., :width], cut, mean=MEAN, std=STD)
    row[..., width:] = 0


def line_width(cut: Array) -> int:
    """Its width once it is as high as the network reads."""
    height, width, _ = cut.shape
    wanted: int = math.ceil(width * LINE_HEIGHT / height)
    return min(WIDEST_LINE, wanted)


def decode(row: Array, known: Sequence[str]) -> tuple[str, float]:
    """The text of one line, and the mean probability of its characters.

    row: (columns, classes). The network repeats a character over the columns that it
    covers and says 0, for nothing, between two that are the same.
    """
    best = row.argmax(axis=1)
    begins = np.diff(best, prepend=0) != 0
    (kept,) = np.nonzero(begins & (best != 0))
    if not kept.size:
        return "", 0.0
    text = "".join(known[index] for index in best[kept])
    return text, float(row[kept, best[kept]].mean())


# --- the page to read when none is given ----------------------------------------------

PAGE_TEXT = (
    "Harbour Bakery",
    "Order 4711 for Thursday, 12 March",
    "24 rye rolls, 36 with poppy seeds",
    "7 plum cakes, 2 without nuts",
    "1 loaf (not sliced!)",
    "Total: 83.50 + 5.85 tax = 89.35",
    "Fresh from the oven at six.",
)
STAMP = "PAID 89.35"


def draw_page() -> Array:
    """An order of a bakery, with a stamp across."""
    page: Array = np.full((900, 1200, 3), 245, np.uint8)
    for row, text in enumerate(PAGE_TEXT):
        scale, ink = (2.4, (60, 30, 20)) if row == 0 else (1.5, (30, 30, 30))
        write(page, text, (70, 120 + 95 * row), scale, ink)
    stamp = np.full_like(page, 255)
    write(stamp, STAMP, (700, 800), 1.8, (60, 60, 200))
    turn = cv2.getRotationMatrix2D((880, 780), 12, 1.0)
    turned = cv2.warpAffine(stamp, turn, page.shape[1::-1], borderValue=(255,) * 3)
    return np.minimum(page, turned)


def write(
    page: Array, text: str, at: tuple[int, int], scale: float, ink: Sequence[int]
) -> None:
    cv2.putText(page, text, at, cv2.FONT_HERSHEY_SIMPLEX, scale, ink, 2, cv2.LINE_AA)


# --- the program ----------------------------------------------------------------------


@contextlib.contextmanager
def server(url: str | None) -> Iterator[str]:
    """The server to ask: the one at `url`, or one that lives as long as the block."""
    if url:
        yield url
        return
    with TritonServer(demo_models("ocr_det", "ocr_rec")) as own:
        yield own.http_url


def table(lines: Sequence[Line]) -> str:
    """All lines for people, at most 80 columns wide."""
    if not lines:
        return "No text was found."
    rows = ["score   left    top  width height  text"]
    for line in lines:
        left, top, width, height = cv2.boundingRect(line.corners)
        box = f"{left:6} {top:6} {width:6} {height:6}"
        rows.append(f" {line.score:.2f} {box}  {shortened(line.text, 45)}")
    return "\n".join(rows)


def shortened(text: str, columns: int) -> str:
    """As much of it as fits; characters of East Asia take two columns."""
    taken = 0
    for index, character in enumerate(text):
        taken += 1 + (unicodedata.east_asian_width(character) in "WF")
        if taken > columns:
            return text[: index - 1] + "…"
    return text


def as_json(lines: Sequence[Line]) -> str:
    """All lines for programs."""
    return json.dumps(
        [
            {
                "text": line.text,
                "score": round(line.score, 4),
                "corners": line.corners.astype(float).round(1).tolist(),
            }
            for line in lines
        ],
        ensure_ascii=False,
        indent=2,
    )


def save_marked(path: Path, page: Array, lines: Sequence[Line]) -> None:
    """The page with a frame around every line that was read."""
    frames = [line.corners.round().astype(np.int32) for line in lines]
    marked = cv2.polylines(page.copy(), frames, True, (40, 40, 220), 2, cv2.LINE_AA)
    cv2.imwrite(str(path), marked)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Read the text in a picture.")
    parser.add_argument("picture", nargs="?", help="a page is drawn if not given")
    parser.add_argument("--url", help="of a server with ocr_det and ocr_rec")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--marked", type=Path, help="save the picture with its lines")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Read one picture and print what it says."""
    parser = arguments()
    asked = parser.parse_args(argv)
    # OpenCV has a warning of its own for those.
    if asked.picture and not Path(asked.picture).exists():
        parser.error(f"{asked.picture} does not exist.")
    page = cv2.imread(asked.picture) if asked.picture else draw_page()
    if page is None:
        parser.error(f"{asked.picture} is no picture that OpenCV can read.")
    if asked.marked and not cv2.haveImageWriter(str(asked.marked)):
        parser.error(f"{asked.marked} does not end as a picture's name, such as .png.")
    try:
        with server(asked.url) as url:
            lines = read_text(url, page)
    except shmlane.ShmlaneError as error:
        sys.exit(str(error))
    if asked.marked:
        save_marked(asked.marked, page, lines)
    sys.stdout.write((as_json(lines) if asked.json else table(lines)) + "\n")


if __name__ == "__main__":
    main()
