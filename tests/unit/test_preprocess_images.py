"""`image_into`: any frame, any view, with OpenCV and without, the same values."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shmlane.preprocess import image_into
from tests.unit.preprocessing import (
    BACKENDS,
    MEAN,
    STD,
    Array,
    assert_close,
    backend,
    empty_view,
    expected,
    picture,
)

SIZE = (37, 53)
OTHER_STRIDES: dict[str, Callable[[Array], Array]] = {
    "bottom up": lambda frame: frame[::-1],
    "mirrored": lambda frame: frame[:, ::-1],
    "channels reversed": lambda frame: frame[..., ::-1],
    "every second pixel": lambda frame: frame[::2, ::2],
    "part of a larger frame": lambda frame: frame[3:30, 5:41],
    "columns first": np.asfortranarray,
    "turned": lambda frame: frame.transpose(1, 0, 2),
    "one row repeated": lambda frame: np.broadcast_to(frame[:1], frame.shape),
    "one colour repeated": lambda frame: np.broadcast_to(frame[..., :1], frame.shape),
}


@pytest.fixture(params=BACKENDS, autouse=True)
def chosen_backend(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    with backend(request.param, monkeypatch):
        yield request.param


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("view_dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("frame_dtype", ["uint8", "float16", "float32", "float64"])
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"scale": 1.0},
        {"scale": 1 / 255},
        {"scale": 1 / 255, "mean": 0.5, "std": 0.25},
        {"scale": 0.5, "mean": -3.0},
        {"scale": 1.0, "swap_rb": True},
        {"scale": 2.0, "std": 3.0, "swap_rb": True},
    ],
    ids=str,
)
def test_values_are_those_of_the_textbook(
    layout: str,
    view_dtype: str,
    frame_dtype: str,
    channels: int,
    options: dict[str, Any],
) -> None:
    options = {**options, "swap_rb": channels > 1 and "swap_rb" in options}
    frame = picture(*SIZE, channels, dtype=frame_dtype)
    view = empty_view(SIZE, channels, layout, view_dtype)
    image_into(view, frame, **options)
    assert_close(view, expected(frame, layout, view_dtype, **options))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("view_dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("frame_dtype", ["uint8", "float32"])
@pytest.mark.parametrize("swap_rb", [False, True])
def test_mean_and_std_are_in_the_order_of_the_view(
    layout: str, view_dtype: str, frame_dtype: str, swap_rb: bool
) -> None:
    frame = picture(*SIZE, 3, dtype=frame_dtype)
    view = empty_view(SIZE, 3, layout, view_dtype)
    options: dict[str, Any] = {
        "scale": 1 / 255, "mean": MEAN, "std": STD, "swap_rb": swap_rb
    }  # fmt: skip
    image_into(view, frame, **options)
    assert_close(view, expected(frame, layout, view_dtype, **options))


@pytest.mark.parametrize("order", OTHER_STRIDES)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("swap_rb", [False, True])
@pytest.mark.parametrize("view_dtype", ["float32", "uint8"])
def test_frames_of_any_strides_are_read_right(
    order: str, layout: str, swap_rb: bool, view_dtype: str
) -> None:
    frame = OTHER_STRIDES[order](picture(*SIZE, 3))
    view = empty_view(frame.shape[:2], 3, layout, view_dtype)
    image_into(view, frame, scale=1.0, swap_rb=swap_rb)
    wanted = expected(frame, layout, view_dtype, swap_rb=swap_rb)
    assert np.array_equal(view, wanted)


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (9, 1), (641, 479), (3, 300_001)])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("view_dtype", ["float32", "uint8"])
def test_odd_sizes_and_sizes_of_several_blocks_are_written_whole(
    size: tuple[int, int], layout: str, view_dtype: str
) -> None:
    frame = picture(*size, 3)
    view = empty_view(size, 3, layout, view_dtype)
    image_into(view, frame, scale=0.5, mean=(1, 2, 3), layout=layout)  # type: ignore[arg-type]
    assert_close(view, expected(frame, layout, view_dtype, scale=0.5, mean=(1, 2, 3)))


def test_a_frame_larger_than_a_block_is_written_whole() -> None:
    frame = picture(700, 801, 3)
    view = empty_view((700, 801), 3, "nchw")
    image_into(view, frame, swap_rb=True)
    assert_close(view, expected(frame, "nchw", "f4", scale=1 / 255, swap_rb=True))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_grey_frame_needs_no_axis_for_its_channel(layout: str) -> None:
    frame = picture(*SIZE)
    view = empty_view(SIZE, 1, layout)
    image_into(view, frame)
    assert_close(view, expected(frame, layout, "f4", scale=1 / 255))


def test_a_view_may_lack_the_batch_axis_and_lie_in_steps() -> None:
    frame = picture(*SIZE, 3)
    memory = np.full((3, SIZE[0] * 2, SIZE[1] * 3), 77, np.float32)
    image_into(memory[:, ::2, ::3], frame, scale=1)
    assert np.array_equal(memory[:, ::2, ::3], frame.transpose(2, 0, 1))
    assert (memory[:, 1::2] == 77).all()
    assert (memory[:, :, 1::3] == 77).all()


@pytest.mark.parametrize("view_dtype", ["float16", "uint8"])
def test_tables_fill_a_view_that_lies_in_steps(view_dtype: str) -> None:
    frame = picture(*SIZE, 3)
    memory = np.full((3, SIZE[0], SIZE[1] * 2), 77, view_dtype)
    image_into(memory[..., ::2], frame, scale=0.5)
    wanted = expected(frame, "nchw", view_dtype, scale=0.5)[0]
    assert_close(memory[..., ::2], wanted)
    assert (memory[..., 1::2] == 77).all()


def test_the_default_is_255ths_for_numbers_and_none_for_bytes() -> None:
    frame = picture(*SIZE, 3)
    number_view = empty_view(SIZE, 3, "nchw")
    byte_view = empty_view(SIZE, 3, "nchw", "u1")
    image_into(number_view, frame)
    image_into(byte_view, frame)
    assert_close(number_view, expected(frame, "nchw", "f4", scale=1 / 255))
    assert np.array_equal(byte_view[0], frame.transpose(2, 0, 1))


def test_bytes_saturate_and_round_to_even_and_have_no_nan() -> None:
    values = [-np.inf, -1, -0.4, 0.5, 1.5, 2.5, 254.6, 255.4, 256, 1e9, np.inf, np.nan]
    frame = np.array([values], np.float32)
    view = empty_view(frame.shape, 1, "nchw", "u1")
    image_into(view, frame, layout="nchw")
    assert view.ravel().tolist() == [0, 0, 0, 0, 2, 2, 255, 255, 255, 255, 255, 0]


def test_layout_decides_where_the_shape_does_not() -> None:
    first = np.zeros((3, 5, 4), np.float32)
    last = np.zeros((3, 5, 4), np.float32)
    image_into(first, picture(5, 4, 3), scale=1, layout="nchw")
    image_into(last, picture(3, 5, 4), scale=1, layout="nhwc")
    assert np.array_equal(first, picture(5, 4, 3).transpose(2, 0, 1))
    assert np.array_equal(last, picture(3, 5, 4))


def test_threads_write_views_of_their_own_at_once() -> None:
    frames = [picture(64, 96, 3, seed=seed) for seed in range(4)]
    views = [empty_view((64, 96), 3, "nchw", "f2") for _ in frames]

    def fill(view: Array, frame: Array) -> None:
        for _ in range(20):
            image_into(view, frame)

    threads = [
        threading.Thread(target=fill, args=pair)
        for pair in zip(views, frames, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for view, frame in zip(views, frames, strict=True):
        assert_close(view, expected(frame, "nchw", "f2", scale=1 / 255))


def test_a_call_in_the_middle_of_another_harms_neither() -> None:
    """As from a signal handler: here from a trace function, at every line."""
    frame, other = picture(40, 50, 3), picture(40, 50, 3, seed=8)
    view, inner_view = (empty_view((40, 50), 3, "nchw", "f2") for _ in range(2))
    nested = 0

    def interrupt(*_: object) -> Any:
        nonlocal nested
        sys.settrace(None)
        image_into(inner_view, other, mean=0.5)
        nested += 1
        sys.settrace(interrupt)
        return interrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        image_into(view, frame.astype(np.float32))
    finally:
        sys.settrace(before)
    assert nested > 20
    assert_close(view, expected(frame, "nchw", "f2", scale=1 / 255))
    assert_close(inner_view, expected(other, "nchw", "f2", scale=1 / 255, mean=0.5))


def test_the_frame_is_only_read() -> None:
    frame = picture(*SIZE, 3)
    before = frame.copy()
    frame.flags.writeable = False
    image_into(empty_view(SIZE, 3, "nchw"), frame, swap_rb=True, mean=MEAN, std=STD)
    assert np.array_equal(frame, before)
