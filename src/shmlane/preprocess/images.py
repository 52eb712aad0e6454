"""A frame into a view: as it is, resized, letterboxed, or its middle.

Owns the public functions and the order of their steps: everything is checked before the
first byte is written. Refuses to return arrays; the view is the result.
"""

from __future__ import annotations

from shmlane.errors import TensorMismatch, UsageError
from shmlane.metadata import Array

from .letterbox import Letterbox
from .painting import paint, paint_colour
from .recipe import PerChannel, Recipe, make_recipe
from .resizing import Interpolation, Size, check_interpolation, resized
from .target import Layout, Target, check_pair, check_same_size, open_frame, open_target


def image_into(
    view: Array,
    frame: Array,
    *,
    scale: float | None = None,
    mean: PerChannel | None = None,
    std: PerChannel | None = None,
    swap_rb: bool = False,
    layout: Layout = "auto",
) -> None:
    """Write `frame` into `view` as `(frame * scale - mean) / std`, in one pass.

    view: writable, float32, float16 or uint8; one image, channels first (1, C, H, W) or
    (C, H, W), or last (1, H, W, C) or (H, W, C). frame: uint8, float16, float32 or
    float64 of shape (H, W) or (H, W, C), of any strides; height, width and channels (1,
    3 or 4) as the view's.

    scale: by default 1/255, whatever the frame's dtype, and 1 for a uint8 view. mean,
    std: in what scaling makes of values; a number, or one for each channel in the
    view's order. swap_rb: red and blue change places (BGR to RGB and back). layout:
    "nchw", "nhwc", or "auto", which decides by where the view has 1, 3 or 4.

    Computes in float32. A uint8 view takes whole numbers: rounded, ties to even, kept
    between 0 and 255; NaN becomes 0.

    Raises `TensorMismatch` for a shape or dtype, `UsageError` for an option, for a
    read-only view, for a view that "auto" cannot decide and for a frame in the view's
    own memory; nothing is written then. Releases the GIL. Safe from several threads
    for views that do not overlap.
    """
    target, pixels = _open(view, frame, layout)
    check_same_size(target, pixels)
    recipe = _recipe(target, scale, mean, std, swap_rb)
    paint(target, recipe, pixels)


def resize_into(
    view: Array,
    frame: Array,
    *,
    interpolation: Interpolation = "linear",
    scale: float | None = None,
    mean: PerChannel | None = None,
    std: PerChannel | None = None,
    swap_rb: bool = False,
    layout: Layout = "auto",
) -> None:
    """Write `frame`, stretched to the view's height and width, into `view`.

    interpolation: "linear" (half-pixel centres), "nearest", "area" (the best to shrink
    by much) or "cubic"; the latter two need OpenCV. Values of a uint8 frame are rounded
    to whole numbers before they are scaled; without OpenCV they may differ by 1 from
    what they are with it. All else is as `image_into` has it, height and width aside;
    raises `ExtraMissing` too. Works in memory that the thread keeps for the next frame,
    48 MiB at most.
    """
    target, pixels = _open(view, frame, layout)
    check_interpolation(interpolation)
    recipe = _recipe(target, scale, mean, std, swap_rb)
    _paint_resized(target, recipe, pixels, interpolation, target.size)


def letterbox_into(
    view: Array,
    frame: Array,
    *,
    fill: PerChannel = 114,
    interpolation: Interpolation = "linear",
    scale: float | None = None,
    mean: PerChannel | None = None,
    std: PerChannel | None = None,
    swap_rb: bool = False,
    layout: Layout = "auto",
) -> Letterbox:
    """Write `frame`, its proportions kept, into the middle of `view`, and a border.

    fill: the border's colour, as a pixel of the frame: a number, or one for each
    channel in the frame's order; it goes through `scale`, `mean`, `std` and `swap_rb`
    as pixels do. Small frames are enlarged. Returns where the picture lies, which maps
    boxes back. All else is as `resize_into` has it.
    """
    target, pixels = _open(view, frame, layout)
    check_interpolation(interpolation)
    recipe = _recipe(target, scale, mean, std, swap_rb)
    recipe.apply(fill)
    box = Letterbox.fit(_size(pixels), target.size)
    top, left = box.pad_y, box.pad_x
    bottom, right = top + box.inner[0], left + box.inner[1]
    rows, columns = slice(top, bottom), slice(left, right)
    inner = target.part(rows, columns)
    _paint_resized(inner, recipe, pixels, interpolation, inner.size)
    for border in (
        target.part(slice(top)),
        target.part(slice(bottom, None)),
        target.part(rows, slice(left)),
        target.part(rows, slice(right, None)),
    ):
        paint_colour(border, recipe, fill)
    return box


def center_crop_into(
    view: Array,
    frame: Array,
    *,
    shorter_side: int | None = None,
    interpolation: Interpolation = "linear",
    scale: float | None = None,
    mean: PerChannel | None = None,
    std: PerChannel | None = None,
    swap_rb: bool = False,
    layout: Layout = "auto",
) -> None:
    """Write the middle of `frame`, as large as the view, into `view`.

    shorter_side: pixels that the shorter side of the frame is first resized to, its
    proportions kept (the longer rounded down), such as 256 for a view of 224 x 224;
    None cuts the frame as it is. Where the rest is odd, one more is cut off below and
    to the right. All else is as `resize_into` has it. Raises `TensorMismatch` where
    there is less than the view takes.
    """
    target, pixels = _open(view, frame, layout)
    check_interpolation(interpolation)
    recipe = _recipe(target, scale, mean, std, swap_rb)
    size = _by_shorter_side(_size(pixels), shorter_side)
    spare = size[0] - target.size[0], size[1] - target.size[1]
    if min(spare) < 0:
        raise TensorMismatch(
            f"the frame is {size[0]} x {size[1]} and the view takes"
            f" {target.size[0]} x {target.size[1]} (height x width) of it.",
            hint="Say shorter_side=, or use resize_into or letterbox_into.",
            given=size,
            expected=target.size,
        )
    corner = spare[0] // 2, spare[1] // 2
    _paint_resized(target, recipe, pixels, interpolation, size, corner=corner)


def _open(view: Array, frame: Array, layout: str) -> tuple[Target, Array]:
    target, pixels = open_target(view, layout), open_frame(frame)
    check_pair(target, pixels)
    return target, pixels


def _recipe(
    target: Target,
    scale: float | None,
    mean: PerChannel | None,
    std: PerChannel | None,
    swap_rb: bool,
) -> Recipe:
    return make_recipe(
        target.planes.dtype,
        target.channels,
        scale=scale,
        mean=mean,
        std=std,
        swap_rb=swap_rb,
    )


def _paint_resized(
    target: Target,
    recipe: Recipe,
    pixels: Array,
    interpolation: str,
    size: Size,
    *,
    corner: Size = (0, 0),
) -> None:
    with resized(
        pixels, size, interpolation, corner=corner, window=target.size
    ) as blocks:
        for top, rows in blocks:
            paint(target.part(slice(top, top + len(rows))), recipe, rows)


def _size(pixels: Array) -> Size:
    height, width, _ = pixels.shape
    return height, width


def _by_shorter_side(size: Size, shorter_side: int | None) -> Size:
    if shorter_side is None:
        return size
    if type(shorter_side) is not int or shorter_side < 1:
        raise UsageError(
            f"shorter_side={shorter_side!r}: give pixels, a whole number from 1 on.",
            shorter_side=shorter_side,
        )
    height, width = size
    if height < width:
        return shorter_side, width * shorter_side // height
    return height * shorter_side // width, shorter_side
