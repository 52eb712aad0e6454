"""The OCR example: what was drawn is read, and nothing changed between the networks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("cv2", reason="needs the extra [preprocess]")

import cv2
import numpy as np

from examples import ocr
from shmlane.server import TritonServer, demo_models, networks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Array = NDArray[Any]

pytestmark = pytest.mark.usefixtures("no_leftovers")
Told = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def ocr_server() -> Iterator[TritonServer]:
    with TritonServer(demo_models("ocr_det", "ocr_rec")) as server:
        yield server


def written(
    *lines: tuple[str, tuple[int, int]], size: tuple[int, int] = (200, 517)
) -> Array:
    """A page with each text at its place."""
    page: Array = np.full((*size, 3), 255, np.uint8)
    for text, at in lines:
        ocr.write(page, text, at, 1.0, (0, 0, 0))
    return page


def overlap(first: Sequence[int], second: Sequence[int]) -> float:
    """Shared area over the area of both; rectangles as left, top, width, height."""
    count: Array = np.zeros((900, 1200), np.uint8)
    for left, top, width, height in (first, second):
        count[top : top + height, left : left + width] += 1
    return float((count == 2).sum() / (count > 0).sum())


def drawn_rectangles(page: Array) -> list[list[int]]:
    """Where ink is, row by row of the page's text."""
    ink = page.min(axis=2) < 200
    tops = [120 + 95 * row - 65 for row in range(len(ocr.PAGE_TEXT))]
    rectangles = []
    for top in tops:
        rows, columns = np.nonzero(ink[top : top + 95])
        corner = [int(columns.min()), top + int(rows.min())]
        rectangles.append([*corner, int(np.ptp(columns)) + 1, int(np.ptp(rows)) + 1])
    return rectangles


# --- end to end -----------------------------------------------------------------------


def test_the_page_that_it_draws_is_read_word_for_word_where_it_stands(
    ocr_server: TritonServer, capsys: Told
) -> None:
    ocr.main(["--json", "--url", ocr_server.http_url])
    lines = json.loads(capsys.readouterr().out)
    assert [line["text"] for line in lines] == [*ocr.PAGE_TEXT, ocr.STAMP]
    assert min(line["score"] for line in lines) > 0.9
    *straight, stamp = (np.array(line["corners"], np.float32) for line in lines)
    for corners, drawn in zip(straight, drawn_rectangles(ocr.draw_page()), strict=True):
        assert overlap(cv2.boundingRect(corners), drawn) > 0.7
    along = stamp[1] - stamp[0]
    assert np.degrees(np.arctan2(-along[1], along[0])) == pytest.approx(12, abs=2)


@pytest.mark.heavy
def test_alone_it_starts_a_server_of_its_own_and_ends_it() -> None:
    done = subprocess.run(
        (sys.executable, "-W", "error", ocr.__file__),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert ocr.STAMP in done.stdout


def test_people_get_a_table_and_a_picture_with_the_lines_marked(
    ocr_server: TritonServer, tmp_path: Path, capsys: Told
) -> None:
    marked = tmp_path / "marked.png"
    ocr.main(["--marked", str(marked), "--url", ocr_server.http_url])
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 1 + len(ocr.PAGE_TEXT) + 1
    assert all(len(row) <= 80 for row in rows)
    assert rows[2].endswith(ocr.PAGE_TEXT[1])
    picture = cv2.imread(str(marked))
    assert picture is not None
    assert picture.shape == ocr.draw_page().shape
    assert (picture != ocr.draw_page()).any()


@pytest.mark.parametrize(
    ("text", "at", "size", "larger"),
    [
        ("wide and low", (40, 50), (70, 1100), 1),
        ("tall page", (20, 700), (1501, 333), 1),
        ("of a scanner", (40, 90), (200, 517), 5),
    ],
)
def test_pictures_of_all_sizes_are_read(
    ocr_server: TritonServer,
    tmp_path: Path,
    capsys: Told,
    text: str,
    at: tuple[int, int],
    size: tuple[int, int],
    larger: int,
) -> None:
    page = written((text, at), size=size).repeat(larger, 0).repeat(larger, 1)
    path = str(tmp_path / "page.png")
    cv2.imwrite(path, page)
    ocr.main([path, "--json", "--url", ocr_server.http_url])
    (line,) = json.loads(capsys.readouterr().out)
    assert line["text"] == text
    corners = np.array(line["corners"])
    assert (corners >= 0).all()
    assert (corners <= page.shape[1::-1]).all()
    assert (
        cv2.pointPolygonTest(
            corners.astype(np.float32),
            (larger * (at[0] + 40), larger * (at[1] - 5)),
            False,
        )
        > 0
    )


def test_text_that_runs_upwards_is_read(ocr_server: TritonServer) -> None:
    page = np.rot90(written(("upwards 1952", (60, 90)))).copy()
    (line,) = ocr.read_text(ocr_server.http_url, page)
    assert line.text == "upwards 1952"


def test_more_lines_than_fit_a_batch_stay_with_their_boxes(
    ocr_server: TritonServer,
) -> None:
    texts = [f"line {number}" + " and more" * (number % 3) for number in range(10, 20)]
    places = [(30, 60 + 60 * row) for row in range(len(texts))]
    page = written(*zip(texts, places, strict=True), size=(660, 640))
    lines = ocr.read_text(ocr_server.http_url, page)
    assert [line.text for line in lines] == texts


def test_a_page_without_text_says_so(
    ocr_server: TritonServer, tmp_path: Path, capsys: Told
) -> None:
    cv2.imwrite(str(tmp_path / "blank.png"), written())
    blank = [str(tmp_path / "blank.png"), "--url", ocr_server.http_url]
    ocr.main(blank)
    assert capsys.readouterr().out == "No text was found.\n"
    ocr.main([*blank, "--json"])
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere.png"], "nowhere.png does not exist"),
        ([__file__], "test_ocr.py is no picture"),
        (["--marked", "page.text"], "page.text does not end as a picture"),
        (["--url", "127.0.0.1:9"], "could not connect to 127.0.0.1:9"),
    ],
)
def test_what_cannot_work_is_said_in_a_line(
    arguments: list[str], told: str, capsys: Told
) -> None:
    with pytest.raises(SystemExit) as ended:
        ocr.main(arguments)
    # Python prints what is no number itself, and exits with 1.
    assert told in f"{ended.value.code} {capsys.readouterr().err}"


# --- the networks alone ---------------------------------------------------------------
# One interpreter, one onnxruntime and one thread on both sides: nothing may differ, not
# even the last bit, unless a byte was lost on the way.


def test_the_detector_answers_bit_for_bit_as_onnxruntime_does(
    ocr_server: TritonServer,
) -> None:
    with ocr.open_detector(ocr_server.http_url) as session, session.lease() as lease:
        ocr.write_page(lease, ocr.draw_page())
        given = lease[ocr.PIXELS].copy()
        found = lease.infer()[ocr.MARKED].copy()
    assert given.shape == (1, 3, 736, 960)
    assert found.max() > 0.9
    np.testing.assert_array_equal(found, networks.reference("ocr_det", given))


def test_the_reader_answers_bit_for_bit_as_onnxruntime_does(
    ocr_server: TritonServer,
) -> None:
    page = ocr.draw_page()
    rectangles = drawn_rectangles(page)
    cuts = [page[y : y + high, x : x + wide] for x, y, wide, high in rectangles]
    with ocr.open_reader(ocr_server.http_url) as session:
        for batch in ocr.batches(cuts):
            with session.lease() as lease:
                ocr.write_lines(lease, [cuts[index] for index in batch])
                given = lease[ocr.PIXELS].copy()
                found = lease.infer()[ocr.READ].copy()
            expected = networks.reference("ocr_rec", given)
            np.testing.assert_array_equal(found, expected)


# --- its parts ------------------------------------------------------------------------


def test_nothing_of_an_earlier_request_stands_behind_a_line() -> None:
    row = np.full((3, ocr.LINE_HEIGHT, 320), 9, np.float32)
    ocr.write_line(row, np.full((24, 100, 3), 255, np.uint8))
    assert (row[..., :200] == 1).all()
    assert (row[..., 200:] == 0).all()


@pytest.mark.parametrize(
    ("classes", "text"),
    [
        ([1, 1, 2, 0, 2, 3, 0, 0], "abbc"),
        ([0, 3, 3, 3, 0, 3], "cc"),
        ([1], "a"),
        ([0, 0, 0], ""),
    ],
)
def test_a_character_counts_once_until_nothing_comes_between(
    classes: list[int], text: str
) -> None:
    row = np.full((len(classes), 4), 0.1, np.float32)
    row[np.arange(len(classes)), classes] = 0.7
    read, score = ocr.decode(row, ["", "a", "b", "c"])
    assert read == text
    assert score == pytest.approx(0.7 if text else 0.0)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("exactly 10", "exactly 10"),
        ("eleven char", "eleven ch…"),
        ("船的名字是", "船的名字是"),
        ("船的名字是海", "船的名字…"),
    ],
)
def test_the_table_shows_as_much_text_as_fits(text: str, shown: str) -> None:
    assert ocr.shortened(text, 10) == shown
