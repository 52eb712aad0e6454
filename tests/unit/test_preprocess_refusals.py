"""What `shmlane.preprocess` refuses: told with what was given, nothing written."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shmlane
from shmlane.preprocess import (
    center_crop_into,
    image_into,
    letterbox_into,
    resize_into,
)
from tests.unit.preprocessing import Array, empty_view, picture

WRITERS: list[Callable[..., Any]] = [
    image_into,
    resize_into,
    letterbox_into,
    center_crop_into,
]
SIZE = (8, 9)


@pytest.fixture(params=WRITERS, ids=lambda write: write.__name__)
def write(request: pytest.FixtureRequest) -> Callable[..., Any]:
    chosen: Callable[..., Any] = request.param
    return chosen


def refused(
    write: Callable[..., Any],
    error: type[Exception],
    told: str,
    *,
    view: Any = None,
    frame: Any = None,
    **options: Any,
) -> None:
    """The call raises, says so, and leaves the view as it was."""
    view = empty_view(SIZE, 3, "nchw") if view is None else view
    frame = picture(*SIZE, 3) if frame is None else frame
    before = np.array(view)
    with pytest.raises(error, match=told):
        write(view, frame, **options)
    assert np.array_equal(view, before)


@pytest.mark.parametrize(
    ("frame", "told"),
    [
        ([[1, 2]], "frame is a list"),
        (None, "frame is a NoneType"),
        (picture(8, 9, 3).astype(np.int16), "int16; allowed are .*uint8"),
        (picture(8, 9, 3).astype(">f4"), ">f4"),
        (picture(8, 9, 3).astype(bool), "bool"),
        (picture(8, 9, 3).astype(complex), "complex128"),
        (picture(8, 9, 2), r"\(8, 9, 2\).* 1, 3, 4 channels"),
        (picture(8, 9, 5), r"\(8, 9, 5\)"),
        (picture(3, 8, 9), r"\(3, 8, 9\)"),
        (picture(1, 8, 9, 3), r"\(1, 8, 9, 3\)"),
        (picture(9), r"\(9,\)"),
        (picture(0, 9, 3), r"empty.*\(0, 9, 3\)"),
        (picture(8, 0), r"empty.*\(8, 0\)"),
        (picture(8, 9, 0), r"\(8, 9, 0\)"),
    ],
)
def test_bad_frames(write: Callable[..., Any], frame: Any, told: str) -> None:
    # None stands for the usual frame in `refused`.
    with pytest.raises(shmlane.TensorMismatch, match=told):
        write(empty_view(SIZE, 3, "nchw"), frame)


@pytest.mark.parametrize(
    ("view", "told"),
    [
        ([[1.0]], "view is a list"),
        (np.zeros((3, 8, 9), np.float64), "float64; allowed are float32"),
        (np.zeros((3, 8, 9), np.int8), "int8"),
        (np.zeros((3, 8, 9), ">f4"), ">f4"),
        (np.zeros((2, 3, 8, 9), np.float32), r"\(2, 3, 8, 9\).*view\[i\]"),
        (np.zeros((1, 1, 3, 8, 9), np.float32), r"\(1, 1, 3, 8, 9\)"),
        (np.zeros((8, 9), np.float32), r"\(8, 9\)"),
        (np.zeros((0, 3, 8, 9), np.float32), r"\(0, 3, 8, 9\)"),
        (np.zeros((3, 0, 9), np.float32), "empty"),
        (np.zeros((2, 8, 9), np.float32), r"\(2, 8, 9\).* 1, 3, 4 channels"),
    ],
)
def test_bad_views(write: Callable[..., Any], view: Any, told: str) -> None:
    refused(write, shmlane.TensorMismatch, told, view=view)


def test_a_read_only_view(write: Callable[..., Any]) -> None:
    view = empty_view(SIZE, 3, "nchw")
    view.flags.writeable = False
    refused(write, shmlane.UsageError, "read-only", view=view)


def test_a_shape_that_fits_both_layouts(write: Callable[..., Any]) -> None:
    view = np.zeros((3, 8, 4), np.float32)
    refused(write, shmlane.UsageError, 'layout="nchw" or', view=view)


@pytest.mark.parametrize(
    ("layout", "shape"), [("nchw", (8, 9, 3)), ("nhwc", (3, 8, 9))]
)
def test_a_layout_that_the_shape_contradicts(
    write: Callable[..., Any], layout: str, shape: tuple[int, ...]
) -> None:
    view = np.zeros(shape, np.float32)
    refused(write, shmlane.TensorMismatch, layout, view=view, layout=layout)


def test_an_unknown_layout(write: Callable[..., Any]) -> None:
    refused(write, shmlane.UsageError, "auto, nchw, nhwc", layout="NCHW")


@pytest.mark.parametrize(
    ("given", "taken", "hint"),
    [
        (4, 3, r"frame\[\.\.\., :3\]"),
        (3, 4, "Add"),
        (1, 3, "broadcast"),
        (3, 1, "grey"),
    ],
)
def test_other_channels_than_the_view_takes(
    write: Callable[..., Any], given: int, taken: int, hint: str
) -> None:
    refused(
        write,
        shmlane.TensorMismatch,
        f"{given} channels? .* takes {taken}.*{hint}",
        view=empty_view(SIZE, taken, "nchw"),
        frame=picture(*SIZE, given),
    )


def test_the_advice_for_channels_works() -> None:
    view = empty_view(SIZE, 3, "nchw")
    frame = picture(*SIZE, 4)
    image_into(view, frame[..., :3], scale=1)
    assert np.array_equal(view[0], frame[..., :3].transpose(2, 0, 1))
    grey = picture(*SIZE)
    image_into(view, np.broadcast_to(grey.reshape(8, 9, 1), (8, 9, 3)), scale=1)
    assert all(np.array_equal(plane, grey) for plane in view[0])


def test_a_frame_of_another_size_has_other_functions() -> None:
    refused(
        image_into,
        shmlane.TensorMismatch,
        "7 x 9 .* 8 x 9 .*resize_into",
        frame=picture(7, 9, 3),
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"scale": np.nan}, "scale=nan"),
        ({"scale": np.inf}, "scale=inf"),
        ({"scale": "1"}, "scale='1'"),
        ({"scale": (1, 2, 3)}, "scale"),
        ({"mean": (1, 2)}, r"mean=\(1, 2\).* 3 channels"),
        ({"mean": "grey"}, "mean"),
        ({"mean": [[1, 2, 3]]}, "mean"),
        ({"mean": ()}, "mean"),
        ({"std": 0}, "zero"),
        ({"std": (1, 0, 1)}, "zero"),
        ({"std": (1, np.nan, 1)}, "std"),
        ({"std": 1e-300}, "too large for float32"),
    ],
    ids=str,
)
def test_numbers_that_give_no_value(
    write: Callable[..., Any], options: dict[str, Any], told: str
) -> None:
    refused(write, shmlane.UsageError, told, **options)


def test_red_and_blue_of_a_grey_picture(write: Callable[..., Any]) -> None:
    view = empty_view(SIZE, 1, "nchw")
    refused(
        write,
        shmlane.UsageError,
        "1 channel",
        view=view,
        frame=picture(*SIZE),
        swap_rb=True,
    )


def test_a_frame_in_the_views_own_memory(write: Callable[..., Any]) -> None:
    memory = np.zeros((8, 9, 3), np.float32)
    frame: Array = memory[:, ::-1]
    refused(write, shmlane.UsageError, "same memory", view=memory, frame=frame)


def test_opencv_is_not_imported_before_it_is_used() -> None:
    code = "import sys, shmlane.preprocess; sys.exit('cv2' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
