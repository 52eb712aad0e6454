"""Frames, views and what they should become, for the tests of `shmlane.preprocess`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shmlane.preprocess.opencv import opencv

Array = npt.NDArray[Any]

BACKENDS = ("opencv", "numpy")
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


@contextmanager
def backend(name: str, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work with OpenCV, or as if it were not installed."""
    if name == "numpy":
        patch.setitem(sys.modules, "cv2", None)
    else:
        pytest.importorskip("cv2")
    opencv.cache_clear()
    try:
        assert (opencv() is None) == (name == "numpy")
        yield
    finally:
        patch.undo()
        opencv.cache_clear()


def picture(*shape: int, dtype: npt.DTypeLike = np.uint8, seed: int = 7) -> Array:
    numbers = np.random.default_rng(seed).integers(0, 256, shape)
    return numbers.astype(dtype)


def empty_view(
    size: tuple[int, int], channels: int, layout: str, dtype: npt.DTypeLike = np.float32
) -> Array:
    """A view whose values are all wrong until they are written."""
    shape = (channels, *size) if layout == "nchw" else (*size, channels)
    return np.full((1, *shape), 77, dtype)


def expected(
    frame: Array,
    layout: str,
    dtype: npt.DTypeLike,
    *,
    scale: float = 1.0,
    mean: Any = 0.0,
    std: Any = 1.0,
    swap_rb: bool = False,
) -> Array:
    """What the textbook makes of a frame, in float64 until the end."""
    pixels = (frame[..., None] if frame.ndim == 2 else frame).astype(np.float64)
    if swap_rb:
        pixels = pixels[..., [2, 1, 0, 3][: pixels.shape[-1]]]
    values = (pixels * scale - np.asarray(mean)) / np.asarray(std)
    if layout == "nchw":
        values = values.transpose(2, 0, 1)
    if np.dtype(dtype) == np.uint8:
        values = np.clip(np.rint(values), 0, 255)
    made: Array = values.astype(dtype)[None]
    return made


def assert_close(found: Array, wanted: Array) -> None:
    """Equal but for rounding once: one step of the dtype, or one whole number."""
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    if found.dtype == np.uint8:
        assert np.abs(found.astype(int) - wanted.astype(int)).max() <= 1
        return
    step = float(np.finfo(found.dtype).eps)
    np.testing.assert_allclose(
        found.astype(np.float64), wanted.astype(np.float64), rtol=step, atol=4 * step
    )
