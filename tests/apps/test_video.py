"""The video example: boxes are where the ball was drawn, in order, at full flight."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("cv2", reason="needs the extra [preprocess]")

import cv2
import numpy as np

from examples.video import video
from shmlane import Session
from shmlane.server import TritonServer
from tests.polling import eventually
from tests.sessions import all_free, stopped

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    Array = NDArray[Any]

pytestmark = pytest.mark.usefixtures("no_leftovers")
Told = pytest.CaptureFixture[str]

# Pixels: a pixel of the detector is 2.5 of the clip, and compression blurs edges.
TOLERANCE = 4


@pytest.fixture(scope="module")
def ball_server() -> Iterator[TritonServer]:
    with TritonServer(video.MODELS) as server:
        yield server


def drawn_box(number: int) -> Array:
    """Around what was drawn of the ball; without area where it is outside."""
    seen: Array = np.zeros((video.HEIGHT, video.WIDTH), np.uint8)
    cv2.circle(seen, video.ball_at(number), video.RADIUS, (1,), cv2.FILLED)
    left, top, width, height = cv2.boundingRect(seen)
    return np.array([left, top, left + width, top + height])


def frames(path: Path) -> list[Array]:
    with video.opened_clip(path) as capture:
        return list(video.decoded(capture))


def has_mark(frame: Array) -> bool:
    """Whether anything is as green as the mark; compression changes it a little."""
    blue, green, red = np.moveaxis(frame.astype(int), 2, 0)
    return bool((green - np.maximum(blue, red) > 80).any())


# --- end to end -----------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 8])
def test_every_box_is_where_the_ball_was_drawn_frame_by_frame(
    ball_server: TritonServer, tmp_path: Path, capsys: Told, slots: int
) -> None:
    output = tmp_path / "found.avi"
    where = ["--output", str(output), "--url", ball_server.http_url]
    video.main([*where, "--slots", str(slots), "--json"])
    summary = json.loads(capsys.readouterr().out)
    boxes = summary["boxes"]
    assert len(boxes) == summary["frames"] == video.FRAMES
    marked = frames(output)
    assert len(marked) == video.FRAMES
    for number, (box, frame) in enumerate(zip(boxes, marked, strict=True)):
        drawn = drawn_box(number)
        width = drawn[2] - drawn[0]
        assert has_mark(frame) is (box is not None)
        if box is None:
            assert width < 2 * TOLERANCE, f"frame {number}"
        else:
            assert np.abs(box - drawn).max() < TOLERANCE, f"frame {number}"
    # It does leave the picture.
    assert 0 < boxes.count(None) < video.FRAMES / 4


def test_all_slots_are_in_flight_at_once_and_free_afterwards(
    ball_server: TritonServer, tmp_path: Path
) -> None:
    clip, output = tmp_path / "ball.avi", tmp_path / "found.avi"
    video.make_clip(clip, frames=40)
    with (
        Session(ball_server.http_url, "ball", slots=8) as session,
        ThreadPoolExecutor(1) as pool,
    ):
        with stopped(ball_server):
            following = pool.submit(video.follow, session, clip, output)
            eventually(lambda: session.stats().in_flight == 8, "all are in flight")
        assert len(following.result(timeout=30).boxes) == 40
        stats = all_free(session)
    assert (stats.slots, stats.spare_slots, stats.retries) == (8, 0, 0)


def test_boxes_of_a_tall_clip_are_mapped_back_too(
    ball_server: TritonServer, tmp_path: Path
) -> None:
    clip, output = tmp_path / "tall.avi", tmp_path / "found.avi"
    middles = [(40 + 5 * number, 600 - 13 * number) for number in range(20)]
    with video.new_clip(clip, 25, (240, 640)) as writer:
        for middle in middles:
            frame: Array = np.full((640, 240, 3), 90, np.uint8)
            writer.write(cv2.circle(frame, middle, 20, video.ORANGE, cv2.FILLED))
    with Session(ball_server.http_url, "ball", slots=3) as session:
        summary = video.follow(session, clip, output)
    for box, (x, y) in zip(summary.boxes, middles, strict=True):
        assert box == pytest.approx([x - 20, y - 20, x + 21, y + 21], abs=TOLERANCE)


def test_people_are_told_what_was_found_and_where_it_is(
    ball_server: TritonServer, tmp_path: Path, capsys: Told
) -> None:
    output = str(tmp_path / "found.avi")
    video.main(["--output", output, "--url", ball_server.http_url])
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{video.FRAMES} frames in ")
    assert second.startswith("ball found in ")
    assert third == f"written to {output}"


def test_whoever_stops_in_the_middle_leaves_every_slot_free(
    ball_server: TritonServer, tmp_path: Path
) -> None:
    video.make_clip(tmp_path / "ball.avi", frames=60)
    with (
        Session(ball_server.http_url, "ball", slots=4) as session,
        video.opened_clip(tmp_path / "ball.avi") as capture,
    ):
        decoded = video.decoded(capture)
        with session.stream(decoded, write=video.write, read=video.read) as stream:
            for _ in range(6):
                next(stream)
        all_free(session)
        # Only a few frames were decoded beyond those that were asked for.
        assert len(list(decoded)) > 30


@pytest.mark.heavy
def test_alone_it_makes_a_clip_and_starts_a_server_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run(
        (sys.executable, "-W", "error", video.__file__, "--json"),
        capture_output=True,
        cwd=tmp_path,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["frames"] == video.FRAMES
    assert {each.name for each in tmp_path.iterdir()} == {"out"}
    made = {each.name for each in (tmp_path / "out").iterdir()}
    assert made == {"ball.avi", "ball-found.avi"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere.mp4"], "nowhere.mp4 does not exist"),
        ([__file__], "test_video.py is no clip that OpenCV can read"),
        (["--output", "/nowhere/found.avi"], "ball.avi cannot be written as a clip"),
        (["--output", "ball.avi"], "ball.avi would be written over"),
        (["--slots", "0"], "slots"),
        (["--url", "127.0.0.1:9"], "could not connect to 127.0.0.1:9"),
    ],
)
def test_what_cannot_work_is_said_in_a_line(
    ball_server: TritonServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Told,
    arguments: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        video.main(["--url", ball_server.http_url, *arguments])
    # Python prints what is no number itself, and exits with 1.
    assert told in f"{ended.value.code} {capsys.readouterr().err}"
    assert not list(tmp_path.rglob("*.avi"))
