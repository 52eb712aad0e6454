"""Pixels into a target, block by block, channels put where the target has them.

Owns the blocks and the order of channels. A block is small enough to stay in the
processor's cache from its first pass to its last, so that main memory sees each pixel
read once and each value written once. Refuses to check anything: what comes here fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from shmlane.metadata import Array

from .arithmetic import Writer, is_by_table, make_row_writer, make_writer, saturate
from .opencv import opencv
from .recipe import PerChannel, Recipe
from .scratch import scratch
from .target import Target

# 1 MiB of float32 per plane. With smaller blocks the calls of NumPy take the time.
BLOCK_PIXELS = 1 << 18
_Split = Callable[[Array], Sequence[Array]]
_Reorder = Callable[[Array], Array]
# float16 is not among what all versions of OpenCV know.
_OPENCV_TYPES = (np.dtype(np.uint8), np.dtype(np.float32), np.dtype(np.float64))


def paint(target: Target, recipe: Recipe, pixels: Array) -> None:
    """Write `pixels` (height x width x channels), which have the target's size."""
    step = block_rows(*target.size)
    if target.is_nchw:
        _paint_planes(target, recipe, pixels, step)
    else:
        _paint_pixels(target, recipe, pixels, step)


def paint_colour(target: Target, recipe: Recipe, colour: PerChannel) -> None:
    """Write one colour, given as the frame has it, over the whole target."""
    values = recipe.apply(colour)
    if target.planes.dtype == np.uint8:
        saturate(values)
    np.copyto(target.planes, values[:, None, None], casting="unsafe")


def block_rows(height: int, width: int, *, pixels: int = BLOCK_PIXELS) -> int:
    """How many rows make a block; blocks of one picture are about equally large."""
    most = max(1, pixels // width)
    return -(-height // -(-height // most))


def _paint_planes(target: Target, recipe: Recipe, pixels: Array, step: int) -> None:
    writers = _channel_writers(target, recipe, pixels)
    outs = list(target.planes)
    with _splitter(pixels, step) as split:
        for top in range(0, len(pixels), step):
            rows = slice(top, top + step)
            planes = split(pixels[rows])
            for out, channel, write in zip(outs, recipe.order, writers, strict=True):
                write(out[rows], planes[channel])


def _paint_pixels(target: Target, recipe: Recipe, pixels: Array, step: int) -> None:
    write = _pixel_writer(target, recipe, pixels)
    outs = target.pixels
    with _reorderer(pixels, recipe.order, step) as reorder:
        for top in range(0, len(pixels), step):
            rows = slice(top, top + step)
            write(outs[rows], reorder(pixels[rows]))


def _channel_writers(target: Target, recipe: Recipe, pixels: Array) -> list[Writer]:
    types = pixels.dtype, target.planes.dtype
    if recipe.is_uniform:
        one = make_writer(recipe.factors[0], recipe.addends[0], *types)
        return [one] * target.channels
    pairs = zip(recipe.factors, recipe.addends, strict=True)
    return [make_writer(factor, addend, *types) for factor, addend in pairs]


def _pixel_writer(target: Target, recipe: Recipe, pixels: Array) -> Writer:
    """One for pixels whose channels are last, in the view's order."""
    types = pixels.dtype, target.planes.dtype
    if not recipe.is_uniform and not is_by_table(*types):
        width = target.size[1]
        return make_row_writer(recipe.factors, recipe.addends, width, types[1])
    writers = _channel_writers(target, recipe, pixels)
    if recipe.is_uniform:
        return writers[0]

    def write(out: Array, source: Array) -> None:
        for channel, write_channel in enumerate(writers):
            write_channel(out[..., channel], source[..., channel])

    return write


@contextmanager
def _splitter(pixels: Array, step: int) -> Iterator[_Split]:
    """Takes a block apart; OpenCV lays each channel in one piece, NumPy strides."""
    height, width, channels = pixels.shape
    cv2 = opencv()
    if cv2 is None or channels == 1 or not _is_for_opencv(pixels):
        yield lambda rows: list(rows.transpose(2, 0, 1))
        return
    with scratch("planes", (channels, min(step, height), width), pixels.dtype) as room:
        whole = list(room)

        def split(rows: Array) -> Sequence[Array]:
            count = len(rows)
            short = whole if count == len(whole[0]) else list(room[:, :count])
            planes: Sequence[Array] = cv2.split(rows, short)
            return planes

        yield split


def _is_for_opencv(pixels: Array) -> bool:
    """Whether pixels lie one after the other; OpenCV would copy others first."""
    packed = (pixels.shape[2] * pixels.itemsize, pixels.itemsize)
    return pixels.dtype in _OPENCV_TYPES and pixels.strides[1:] == packed


@contextmanager
def _reorderer(pixels: Array, order: Sequence[int], step: int) -> Iterator[_Reorder]:
    """Gives a block with its channels in that order."""
    if list(order) == sorted(order):
        yield lambda rows: rows
        return
    with scratch(
        "pixels", (min(step, len(pixels)), *pixels.shape[1:]), pixels.dtype
    ) as room:

        def reorder(rows: Array) -> Array:
            made = room[: len(rows)]
            # A channel at a time: NumPy is slow at runs of three values.
            for channel, source in enumerate(order):
                np.copyto(made[..., channel], rows[..., source])
            return made

        yield reorder
