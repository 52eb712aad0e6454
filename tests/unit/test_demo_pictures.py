"""Pictures of the demo: what is written where, and what counts as found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("cv2", reason="needs the extra [preprocess]")

import cv2

from shmlane.demo import pictures
from shmlane.demo.textboxes import TextBox
from shmlane.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

MEAN = (0.4, 0.5, 0.6)
DEVIATION = (0.2, 0.25, 0.5)


def noise(height: int, width: int, channels: int = 3) -> NDArray[np.uint8]:
    random = np.random.default_rng(3)
    return random.integers(0, 256, (height, width, channels), np.uint8)


def around(line: pictures.TextLine) -> TextBox:
    left, top = line.x - 4, line.y - 4
    right, bottom = line.x + line.width + 4, line.y + line.height + 4
    corners = [[left, top], [right, top], [right, bottom], [left, bottom]]
    return TextBox(np.array(corners, np.float32), 0.9)


def test_planes_are_normalised_as_the_formula_says() -> None:
    picture = noise(32, 48)
    view = np.empty((3, 32, 48), np.float32)
    pictures.planes_into(view, picture, mean=MEAN, deviation=DEVIATION)
    expected = ((picture / 255 - MEAN) / DEVIATION).transpose(2, 0, 1)
    np.testing.assert_allclose(view, expected, atol=1e-5)


def test_planes_are_written_into_the_view_and_nowhere_around_it() -> None:
    block = np.full((3, 3, 20, 20), 7, np.float32)
    pictures.planes_into(block[1], noise(64, 64), mean=MEAN, deviation=DEVIATION)
    assert (block[0] == 7).all()
    assert (block[2] == 7).all()
    assert not (block[1] == 7).any()


def test_a_picture_of_other_channels_is_refused() -> None:
    view = np.empty((3, 8, 8), np.float32)
    with pytest.raises(UsageError, match="4 channels and the tensor 3"):
        pictures.planes_into(view, noise(8, 8, 4), mean=MEAN, deviation=DEVIATION)


def test_an_installed_package_ships_a_photograph() -> None:
    pytest.importorskip("matplotlib", reason="needs the extra [bench]")
    first = pictures.photographs(limit=1)[0]
    assert first.name == "grace_hopper"
    assert first.pixels.shape == (600, 512, 3)


def test_the_lines_of_the_page_stand_inside_it_and_apart() -> None:
    page, lines = pictures.text_page(noise(600, 512))
    taken = np.zeros(page.shape[:2], np.int32)
    for line in lines:
        assert line.x + line.width < pictures.PAGE_SIDE
        taken[line.y : line.y + line.height, line.x : line.x + line.width] += 1
    assert taken.max() == 1


def test_the_portrait_leaves_the_lines_alone() -> None:
    plain = np.full((600, 512, 3), 250, np.uint8)
    page, lines = pictures.text_page(noise(600, 512))
    blank, _ = pictures.text_page(plain)
    for line in lines:
        rows, columns = slice(line.y, line.y + line.height), slice(line.x, None)
        assert (page[rows, columns] == blank[rows, columns]).all()


def test_a_line_counts_as_found_when_a_box_covers_it() -> None:
    _, lines = pictures.text_page(noise(600, 512))
    boxes = [around(line) for line in lines[2:]]
    assert pictures.lines_found(lines, boxes) == len(lines) - 2
    assert pictures.lines_found(lines, []) == 0


def test_boxes_are_drawn_on_a_copy_and_saved(tmp_path: Path) -> None:
    page, lines = pictures.text_page(noise(600, 512))
    before = page.copy()
    drawn = pictures.with_boxes(page, [around(lines[0])])
    pictures.save_png(tmp_path / "new" / "page.png", drawn)
    read = np.asarray(cv2.imread(str(tmp_path / "new" / "page.png")))
    np.testing.assert_array_equal(page, before)
    np.testing.assert_array_equal(read, drawn)
    assert (drawn != page).any()


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match=r"file/page\.png: .*\. Choose another"):
        pictures.save_png(tmp_path / "file" / "page.png", noise(8, 8))
