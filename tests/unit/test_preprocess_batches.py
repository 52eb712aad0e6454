"""`stack_into`: frames into the rows of a batch, counted, none written elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import shmlane
from shmlane.preprocess import image_into, resize_into, stack_into
from tests.unit.preprocessing import Array, expected, picture


def batch(rows: int = 4) -> Array:
    return np.full((rows, 3, 8, 9), 77, np.float32)


def test_frames_are_copied_and_counted_and_the_rest_is_left() -> None:
    view = batch()
    frames = [np.full((3, 8, 9), i, np.float32) for i in range(3)]
    assert stack_into(view, frames) == 3
    assert [row.min() for row in view] == [0, 1, 2, 77]
    assert stack_into(view, []) == 0


def test_a_writer_puts_each_frame_into_its_row() -> None:
    view = batch(2)
    frames = [picture(8, 9, 3, seed=seed) for seed in range(2)]
    assert stack_into(view, frames, write=partial(image_into, scale=1)) == 2
    for row, frame in zip(view, frames, strict=True):
        assert np.array_equal(row, expected(frame, "nchw", "f4")[0])


def test_frames_of_many_sizes_fill_one_batch() -> None:
    view = batch(3)
    frames = [picture(side, side + 2, 3) for side in (5, 20, 31)]
    assert stack_into(view, frames, write=resize_into) == 3
    assert not (view == 77).any()


def test_a_generator_may_use_one_buffer_for_all_its_frames() -> None:
    def camera() -> Iterator[Array]:
        buffer = np.empty((3, 8, 9), np.float32)
        for i in range(3):
            buffer.fill(i)
            yield buffer

    view = batch(3)
    assert stack_into(view, camera()) == 3
    assert [row.max() for row in view] == [0, 1, 2]


def test_too_many_frames_are_refused_before_anything_is_written() -> None:
    view = batch(2)
    frames = [np.zeros((3, 8, 9), np.float32)] * 3
    with pytest.raises(shmlane.UsageError, match="2 rows and there are 3 frames"):
        stack_into(view, frames)
    assert (view == 77).all()


def test_an_endless_generator_ends_with_the_rows() -> None:
    def endless() -> Iterator[Array]:
        while True:
            yield np.zeros((3, 8, 9), np.float32)

    with pytest.raises(shmlane.UsageError, match="more than 2 frames"):
        stack_into(batch(2), endless())


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (np.zeros((3, 8, 1), np.float32), r"\(3, 8, 1\)"),
        (np.zeros((3, 8, 9), np.float64), "float64"),
        ([[1.0]], "list"),
    ],
)
def test_a_plain_copy_neither_converts_nor_repeats(bad: Any, told: str) -> None:
    view = batch(2)
    with pytest.raises(shmlane.TensorMismatch, match=told) as caught:
        stack_into(view, [np.zeros((3, 8, 9), np.float32), bad])
    assert caught.value.__notes__ == ["This was frame 1 of the batch, from 0."]
    assert [row.max() for row in view] == [0, 77]


def test_what_a_writer_raises_comes_through_with_the_number_of_its_frame() -> None:
    def fail(view: Array, frame: int) -> None:
        if frame == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        stack_into(batch(), range(4), write=fail)
    assert "frame 2" in caught.value.__notes__[0]


def test_rows_may_be_single_numbers() -> None:
    view = np.zeros(3, np.int64)
    assert stack_into(view, [np.array(5), np.array(6)]) == 2
    assert view.tolist() == [5, 6, 0]


def test_views_without_rows_or_the_right_to_write_are_refused() -> None:
    bad: Any
    for bad in (np.float32(3), np.array(3.0), [1, 2]):
        with pytest.raises(shmlane.TensorMismatch, match="no rows"):
            stack_into(bad, [])
    view = batch()
    view.flags.writeable = False
    with pytest.raises(shmlane.UsageError, match="read-only"):
        stack_into(view, [])
