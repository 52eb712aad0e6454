"""Follow a ball through a video: all slots in flight while frames are read and drawn.

    python examples/video/video.py                          # its own clip, into out/
    python examples/video/video.py clip.mp4 --output found.avi --slots 8

Owns the way of a frame: decoded, letterboxed straight into a slot, sent, and once its
answer is there drawn into another clip, in the order of the first. `session.stream`
keeps every slot busy meanwhile, and decodes only a few frames ahead of them.
Without --url it starts a tritonserver with the detector in `models`, a stand-in for
yours. Refuses to touch sound: what it writes has pictures alone.

Needs OpenCV: pip install 'shmlane[preprocess]'
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

try:
    import cv2
except ImportError as error:
    sys.exit(f"This needs OpenCV ({error}): pip install 'shmlane[preprocess]'")
import numpy as np
from numpy.typing import NDArray

import shmlane
from shmlane.preprocess import Letterbox, letterbox_into
from shmlane.server import TritonServer

Array = NDArray[Any]

MODELS = Path(__file__).with_name("models")
OUT = Path("out")
# (height, width) that the detector takes.
DETECTOR_SIZE = (256, 256)
# A whole disc fills 0.79 of its box, one half out of the picture a little less.
LEAST_SCORE = 0.5
MARK = (60, 220, 60)


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """A frame and the left, top, right and bottom of the ball in it, None without."""

    frame: Array
    box: Array | None


@dataclass(frozen=True, slots=True)
class Summary:
    """What became of a clip; boxes as in `Seen`, frame by frame."""

    output: str
    frames: int
    seconds: float
    boxes: list[list[float] | None]


# --- from frames to boxes -------------------------------------------------------------


def follow(session: shmlane.Session, clip: Path, output: Path) -> Summary:
    """Find the ball in every frame of `clip` and mark it in `output`."""
    boxes: list[list[float] | None] = []
    began = time.monotonic()
    with (
        opened_clip(clip) as capture,
        new_clip(output, *rate_and_size(capture)) as encoder,
        session.stream(decoded(capture), write=write, read=read) as stream,
    ):
        for seen in stream:
            encoder.write(marked(seen))
            boxes.append(None if seen.box is None else seen.box.round(1).tolist())
    seconds = round(time.monotonic() - began, 3)
    return Summary(str(output), len(boxes), seconds, boxes)


def write(lease: shmlane.Lease, frame: Array) -> None:
    """One frame into a slot: smaller, red first, from 0 to 1, its proportions kept."""
    letterbox_into(lease["images"], frame, swap_rb=True)


def read(frame: Array, result: shmlane.Result) -> Seen:
    """What the detector says of a frame, in pixels of the frame."""
    *box, score = result["ball"].tolist()
    if score < LEAST_SCORE:
        return Seen(frame, None)
    height, width, _ = frame.shape
    placed = Letterbox.fit((height, width), DETECTOR_SIZE)
    return Seen(frame, placed.boxes_back(box))


def marked(seen: Seen) -> Array:
    """The frame with the box drawn into it."""
    if seen.box is not None:
        left, top, right, bottom = seen.box.round().astype(int).tolist()
        # Around the ball, not over it.
        cv2.rectangle(seen.frame, (left - 2, top - 2), (right + 1, bottom + 1), MARK, 2)
    return seen.frame


# --- clips ----------------------------------------------------------------------------


@contextlib.contextmanager
def opened_clip(path: Path) -> Iterator[cv2.VideoCapture]:
    """A clip to decode."""
    capture = cv2.VideoCapture(str(path))
    try:
        if not capture.isOpened():
            raise OSError(f"{path} is no clip that OpenCV can read.")
        yield capture
    finally:
        capture.release()


def decoded(capture: cv2.VideoCapture) -> Iterator[Array]:
    """Its frames, each decoded when it is asked for into memory of its own."""
    while (answer := capture.read())[0]:
        yield answer[1]


def rate_and_size(capture: cv2.VideoCapture) -> tuple[float, tuple[int, int]]:
    """Frames per second, and (width, height)."""
    width = int(capture.get(cv2.CAP_PROP_FRAME_WIDTH))
    height = int(capture.get(cv2.CAP_PROP_FRAME_HEIGHT))
    return capture.get(cv2.CAP_PROP_FPS) or RATE, (width, height)


@contextlib.contextmanager
def new_clip(
    path: Path, rate: float, size: tuple[int, int]
) -> Iterator[cv2.VideoWriter]:
    """A clip to write frames into; size: (width, height)."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), rate, size)
    try:
        if not writer.isOpened():
            raise OSError(f"{path} cannot be written as a clip; name it like out.avi.")
        yield writer
    finally:
        writer.release()


# --- the clip to look at when none is given -------------------------------------------

RATE, FRAMES = 25.0, 100
WIDTH, HEIGHT, RADIUS = 640, 360, 24
ORANGE = (20, 110, 250)


def make_clip(path: Path, *, frames: int = FRAMES) -> None:
    """An orange ball before a hall in grey; it leaves the picture and comes back."""
    random = np.random.default_rng(3)
    grey = cv2.GaussianBlur(
        random.integers(40, 216, (HEIGHT, WIDTH), np.uint8), (9, 9), 0
    )
    hall = cv2.cvtColor(grey, cv2.COLOR_GRAY2BGR)
    with new_clip(path, RATE, (WIDTH, HEIGHT)) as writer:
        for number in range(frames):
            frame = hall.copy()
            cv2.circle(frame, ball_at(number), RADIUS, ORANGE, cv2.FILLED, cv2.LINE_AA)
            writer.write(frame)


def ball_at(number: int) -> tuple[int, int]:
    """Where the middle of the ball is in that frame, in pixels."""
    x = WIDTH / 2 + (WIDTH / 2 + 1.5 * RADIUS) * math.sin(number / 16)
    y = HEIGHT - RADIUS - 250 * abs(math.sin(number / 11))
    return round(x), round(y)


# --- the program ----------------------------------------------------------------------


@contextlib.contextmanager
def server(url: str | None) -> Iterator[str]:
    """The server to ask: the one at `url`, or one that lives as long as the block."""
    if url:
        yield url
        return
    with TritonServer(MODELS) as own:
        yield own.http_url


def as_text(summary: Summary) -> str:
    """The summary for people."""
    found = sum(box is not None for box in summary.boxes)
    rate = summary.frames / max(summary.seconds, 1e-3)
    return (
        f"{summary.frames} frames in {summary.seconds:.2f} s, {rate:.0f} a second\n"
        f"ball found in {found} of them\n"
        f"written to {summary.output}"
    )


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Follow a ball through a video.")
    parser.add_argument(
        "clip", nargs="?", type=Path, help="made beside the output if not given"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=OUT / "ball-found.avi",
        help="the clip with the ball marked (%(default)s)",
    )
    parser.add_argument(
        "--slots", type=int, default=4, help="frames in flight at most (%(default)s)"
    )
    parser.add_argument("--url", help="of a server with the model `ball`")
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Follow the ball through one clip and say how it went."""
    parser = arguments()
    asked = parser.parse_args(argv)
    clip = asked.clip or asked.output.with_name("ball.avi")
    if clip.resolve() == asked.output.resolve():
        parser.error(f"{clip} would be written over while it is read; name another.")
    if asked.clip and not clip.exists():
        parser.error(f"{clip} does not exist.")
    try:
        with (
            server(asked.url) as url,
            shmlane.Session(url, "ball", slots=asked.slots) as session,
        ):
            # Not before: without a server there is nothing to leave behind.
            if asked.output.parent == OUT:
                OUT.mkdir(exist_ok=True)
            if not asked.clip:
                make_clip(clip)
            summary = follow(session, clip, asked.output)
    except (shmlane.ShmlaneError, OSError) as error:
        sys.exit(str(error))
    told = json.dumps(asdict(summary)) if asked.json else as_text(summary)
    sys.stdout.write(told + "\n")


if __name__ == "__main__":
    main()
