"""Frames of another size: resized, letterboxed, cut; and the way back for boxes."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any, Literal, get_args

import numpy as np
import pytest

import shmlane
from shmlane.preprocess import (
    Letterbox,
    center_crop_into,
    image_into,
    letterbox_into,
    resize_into,
)
from shmlane.preprocess.resizing import Interpolation
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

SIZES = [
    ((48, 64), (31, 47)),
    ((31, 47), (48, 64)),
    ((33, 57), (33, 20)),
    ((5, 7), (64, 3)),
    ((1, 1), (8, 8)),
    ((8, 8), (1, 1)),
    ((1080, 1920), (40, 40)),
]
Size = tuple[int, int]


@pytest.fixture(params=BACKENDS)
def chosen_backend(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    with backend(request.param, monkeypatch):
        yield request.param


def resized(frame: Array, size: Size, **options: Any) -> Array:
    """The frame at that size, as numbers that are neither scaled nor turned."""
    channels = 1 if frame.ndim == 2 else frame.shape[2]
    dtype = np.uint8 if frame.dtype == np.uint8 else np.float32
    view = empty_view(size, channels, "nhwc", dtype)
    resize_into(view, frame, scale=1, layout="nhwc", **options)
    made: Array = view[0]
    return made


def bilinear(frame: Array, size: Size) -> Array:
    """From the definition: a pixel is its centre's distance-weighted neighbours."""

    def weights(source: int, target: int) -> Array:
        at = np.clip((np.arange(target) + 0.5) * source / target - 0.5, 0, source - 1)
        shares: Array = np.maximum(0, 1 - np.abs(at[:, None] - np.arange(source)))
        return shares

    down, along = (weights(*pair) for pair in zip(frame.shape, size, strict=False))
    made: Array = np.einsum("ij,jkc,lk->ilc", down, frame.astype(np.float64), along)
    return made


@pytest.mark.parametrize(("source", "target"), SIZES[:-1])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_linear_weighs_the_closest_pixels_by_distance(
    chosen_backend: str, source: Size, target: Size, channels: int
) -> None:
    frame = picture(*source, channels)
    wanted = bilinear(frame, target)
    found = resized(frame, target)
    assert np.abs(found - wanted).max() <= 1
    found = resized(frame.astype(np.float32), target)
    # OpenCV rounds the weights of float32 pictures a little.
    np.testing.assert_allclose(found, wanted, atol=0.05)


@pytest.mark.parametrize(("source", "target"), SIZES)
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64"])
@pytest.mark.parametrize("interpolation", ["linear", "nearest"])
def test_both_backends_make_the_same_picture(
    monkeypatch: pytest.MonkeyPatch,
    source: Size,
    target: Size,
    dtype: str,
    interpolation: Interpolation,
) -> None:
    frame = picture(*source, 3, dtype=dtype)
    made = {}
    for name in BACKENDS:
        with backend(name, monkeypatch):
            made[name] = resized(frame, target, interpolation=interpolation)
    limit = 0 if interpolation == "nearest" else 1 if dtype == "uint8" else 0.05
    difference = np.abs(made["opencv"].astype(float) - made["numpy"])
    assert difference.max() <= limit


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("view_dtype", ["float32", "float16", "uint8"])
def test_resizing_takes_the_options_of_an_image(
    chosen_backend: str, layout: str, view_dtype: str
) -> None:
    frame = picture(48, 64, 3)
    options: dict[str, Any] = {
        "scale": 0.5, "mean": MEAN, "std": STD, "swap_rb": True
    }  # fmt: skip
    view = empty_view((31, 47), 3, layout, view_dtype)
    resize_into(view, frame, **options)
    assert_close(
        view, expected(resized(frame, (31, 47)), layout, view_dtype, **options)
    )


@pytest.mark.parametrize("interpolation", get_args(Interpolation))
def test_a_frame_of_the_right_size_is_not_changed(interpolation: Interpolation) -> None:
    pytest.importorskip("cv2")
    frame = picture(31, 47, 3)[:, ::-1]
    found = resized(frame, (31, 47), interpolation=interpolation)
    assert np.array_equal(found, frame)


@pytest.mark.parametrize("interpolation", ["area", "cubic"])
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64"])
def test_area_and_cubic_are_those_of_opencv(
    interpolation: Interpolation, dtype: str
) -> None:
    cv2 = pytest.importorskip("cv2")
    frame = picture(48, 64, 3, dtype=dtype)
    flag = {"area": cv2.INTER_AREA, "cubic": cv2.INTER_CUBIC}[interpolation]
    known = frame.astype(np.float32) if dtype == "float16" else frame
    wanted = cv2.resize(known, (47, 31), interpolation=flag)
    found = resized(frame, (31, 47), interpolation=interpolation)
    assert np.array_equal(found, wanted.astype(found.dtype))


@pytest.mark.parametrize("interpolation", ["area", "cubic"])
def test_what_needs_opencv_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, interpolation: Interpolation
) -> None:
    view = empty_view((8, 8), 3, "nchw")
    with backend("numpy", monkeypatch), pytest.raises(shmlane.ExtraMissing) as caught:
        resize_into(view, picture(9, 9, 3), interpolation=interpolation)
    assert interpolation in str(caught.value)
    assert "shmlane[preprocess]" in caught.value.hint
    assert (view == 77).all()


def test_an_unknown_interpolation_is_refused_with_the_known_ones() -> None:
    bad: Any = "lanczos"
    with pytest.raises(shmlane.UsageError, match="linear, nearest, area, cubic"):
        resize_into(empty_view((8, 8), 3, "nchw"), picture(9, 9, 3), interpolation=bad)


def test_frames_of_any_strides_are_resized_right(chosen_backend: str) -> None:
    frame = picture(60, 80, 4)
    for turned in (frame[::-1, ::-1, :3], frame[::2, 1::3], frame[..., ::-1]):
        same = np.ascontiguousarray(turned)
        assert np.array_equal(resized(turned, (17, 23)), resized(same, (17, 23)))


# --- letterbox ------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("view_dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize(
    ("source", "pads", "inner"),
    [((40, 80), (0, 16), (32, 64)), ((90, 45), (16, 0), (64, 32))],
)
def test_a_letterbox_has_the_picture_in_its_middle_and_a_border(
    chosen_backend: str,
    layout: str,
    view_dtype: str,
    source: Size,
    pads: Size,
    inner: Size,
) -> None:
    frame = picture(*source, 3)
    options: dict[str, Any] = {
        "scale": 1.5, "mean": (1, 2, 3), "std": (2, 1, 3), "swap_rb": True
    }  # fmt: skip
    view = empty_view((64, 64), 3, layout, view_dtype)
    box = letterbox_into(view, frame, fill=(10, 120, 240), **options)
    assert (box.pad_x, box.pad_y, box.inner) == (*pads, inner)
    canvas = np.full((64, 64, 3), (10, 120, 240), np.uint8)
    (left, top), (height, width) = pads, inner
    canvas[top : top + height, left : left + width] = resized(frame, inner)
    assert_close(view, expected(canvas, layout, view_dtype, **options))


def test_the_usual_border_is_grey_114() -> None:
    view = empty_view((32, 32), 3, "nchw")
    letterbox_into(view, picture(32, 16, 3))
    np.testing.assert_allclose(view[..., :8], 114 / 255, rtol=1e-6)
    np.testing.assert_allclose(view[..., 24:], 114 / 255, rtol=1e-6)


def test_an_odd_rest_is_one_more_to_the_right_and_below() -> None:
    view = empty_view((10, 15), 1, "nhwc", "u1")
    box = letterbox_into(view, np.full((10, 10), 200, np.uint8), fill=0)
    assert (box.pad_x, box.pad_y) == (2, 0)
    columns = view[0, 0, :, 0].tolist()
    assert columns == [0] * 2 + [200] * 10 + [0] * 3


def test_a_bad_fill_is_refused_before_anything_is_written() -> None:
    view = empty_view((32, 32), 3, "nchw")
    for bad in ((1, 2), "grey", np.nan):
        with pytest.raises(shmlane.UsageError, match="fill"):
            letterbox_into(view, picture(32, 16, 3), fill=bad)  # type: ignore[arg-type]
    assert (view == 77).all()


@pytest.mark.parametrize(
    ("source", "target"),
    [((720, 1280), (640, 640)), ((333, 77), (320, 640)), ((3, 2000), (64, 64))],
)
def test_boxes_come_back_to_where_they_were(source: Size, target: Size) -> None:
    box = Letterbox.fit(source, target)
    height, width = source
    generator = np.random.default_rng(3)
    corners = np.sort(generator.random((50, 2, 2)) * [width, height], axis=1)
    boxes = corners.reshape(50, 4)
    ratios = np.array([box.inner[1] / width, box.inner[0] / height] * 2)
    there = boxes * ratios + [box.pad_x, box.pad_y, box.pad_x, box.pad_y]
    np.testing.assert_allclose(box.boxes_back(there), boxes, atol=1e-6)
    # The picture measures what the one scale says, to the pixel.
    assert abs(box.scale * width - box.inner[1]) <= 1
    assert abs(box.scale * height - box.inner[0]) <= 1


def test_a_box_drawn_in_the_view_is_found_in_the_frame(chosen_backend: str) -> None:
    frame = np.zeros((300, 400), np.uint8)
    frame[60:120, 200:300] = 255
    view = empty_view((160, 160), 1, "nchw", "u1")
    box = letterbox_into(view, frame, fill=0, layout="nchw")
    rows, columns = np.nonzero(view[0, 0] > 127)
    seen = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    np.testing.assert_allclose(box.boxes_back(seen), [200, 60, 300, 120], atol=1.3)


def test_boxes_are_clipped_and_keep_their_shape() -> None:
    box = Letterbox.fit((100, 200), (100, 100))
    outside = np.array([[[-50, 0, 500, 500], [0, 0, 100, 10]]], np.float32)
    found = box.boxes_back(outside)
    assert found.dtype == np.float32
    assert found.tolist() == [[[0, 0, 200, 100], [0, 0, 200, 0]]]
    nothing: tuple[Any, ...] = (np.empty((0, 4)), np.empty(0), [])
    for none in nothing:
        assert box.boxes_back(none).shape == (0, 4)
    assert outside[0, 0, 0] == -50


@pytest.mark.parametrize("bad", [np.zeros(3), np.zeros((4, 5)), ["a"] * 4, 7])
def test_what_is_no_array_of_boxes_is_refused(bad: Any) -> None:
    with pytest.raises(shmlane.TensorMismatch, match="left, top, right, bottom"):
        Letterbox.fit((10, 10), (20, 20)).boxes_back(bad)


def test_a_letterbox_is_a_value() -> None:
    box = Letterbox.fit((100, 200), (100, 100))
    assert box == pickle.loads(pickle.dumps(box))
    assert len({box, Letterbox.fit((100, 200), (100, 100))}) == 1
    assert "scale=0.5" in repr(box)
    with pytest.raises(dataclasses.FrozenInstanceError):
        box.scale = 1.0  # type: ignore[misc]


# --- the middle -----------------------------------------------------------------------


def test_the_middle_is_cut_as_it_is(chosen_backend: str) -> None:
    frame = picture(41, 60, 3)
    view = empty_view((20, 31), 3, "nchw", "u1")
    center_crop_into(view, frame, swap_rb=True)
    wanted = empty_view((20, 31), 3, "nchw", "u1")
    image_into(wanted, frame[10:30, 14:45], swap_rb=True)
    assert np.array_equal(view, wanted)


@pytest.mark.parametrize("source", [(90, 160), (160, 90), (20, 33), (64, 64)])
@pytest.mark.parametrize("interpolation", ["linear", "nearest"])
def test_the_middle_of_a_resized_frame_is_what_two_steps_make(
    chosen_backend: str, source: Size, interpolation: Literal["linear", "nearest"]
) -> None:
    frame = picture(*source, 3)
    view = empty_view((56, 48), 3, "nhwc", "u1")
    center_crop_into(view, frame, shorter_side=64, interpolation=interpolation)
    height, width = source
    short = min(source)
    size = height * 64 // short, width * 64 // short
    whole = resized(frame, size, interpolation=interpolation)
    top, left = (size[0] - 56) // 2, (size[1] - 48) // 2
    assert np.array_equal(view[0], whole[top : top + 56, left : left + 48])


def test_a_frame_smaller_than_the_cut_is_refused_with_both_sizes() -> None:
    view = empty_view((20, 31), 3, "nchw")
    with pytest.raises(shmlane.TensorMismatch, match=r"19 x 40 .* 20 x 31"):
        center_crop_into(view, picture(19, 40, 3))
    with pytest.raises(shmlane.TensorMismatch, match=r"24 x 24 .* 20 x 31"):
        center_crop_into(view, picture(40, 40, 3), shorter_side=24)
    assert (view == 77).all()


@pytest.mark.parametrize("bad", [0, -1, 2.5, "8", True])
def test_a_shorter_side_is_a_whole_number_of_pixels(bad: Any) -> None:
    view = empty_view((20, 31), 3, "nchw")
    with pytest.raises(shmlane.UsageError, match="shorter_side"):
        center_crop_into(view, picture(40, 40, 3), shorter_side=bad)
