"""From what a client posts to what the model takes, and back to JSON.

Owns the formats: PNG and JPEG, and arrays as NumPy's `.npy` has them. Refuses to know
web frameworks, sessions, and whatever cannot be decoded.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from shmlane.preprocess import resize_into

Array = npt.NDArray[Any]

_NPY = b"\x93NUMPY"


class NotAPicture(ValueError):
    """The body is no picture that can be read."""


def decode(body: bytes) -> Array:
    """The picture in a body: height, width, colours, with blue first.

    PNG or JPEG, or an `.npy` array with red first. Takes no longer than the picture
    deserves: call it before you lease a slot. Raises `NotAPicture`.
    """
    if body.startswith(_NPY):
        return _array(body)
    try:
        picture = cv2.imdecode(np.frombuffer(body, np.uint8), cv2.IMREAD_COLOR)
    except cv2.error:
        # Empty, or too many pixels.
        picture = None
    if picture is None:
        raise NotAPicture("the body is neither PNG, JPEG nor .npy, or is too large")
    return picture


def _array(body: bytes) -> Array:
    """The array in an `.npy` body, read where it lies; objects are refused."""
    file = io.BytesIO(body)
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise NotAPicture("the .npy is not of version 1.0")
        header = np.lib.format.read_array_header_1_0(file)
        shape, is_fortran, dtype = header
        values = np.frombuffer(body, dtype, math.prod(shape), file.tell())
        array: Array = values.reshape(shape, order="F" if is_fortran else "C")
    except ValueError as error:
        raise NotAPicture(f"the .npy cannot be read: {error}") from error
    if array.ndim != 3:
        raise NotAPicture(f"the array has {array.ndim} dimensions, not 3")
    return array[..., ::-1]


def put(view: Array, picture: Array) -> None:
    """Write a decoded picture into a slot, of the size and colours of the model."""
    resize_into(view, picture, swap_rb=True, interpolation="area")


def report(outputs: Mapping[str, Array]) -> dict[str, list[float]]:
    """What the model found, as JSON has it: nothing here points into a slot."""
    return {
        "colour": outputs["COLOUR"][0].tolist(),
        "brightest": outputs["BRIGHTEST"][0].tolist(),
    }
