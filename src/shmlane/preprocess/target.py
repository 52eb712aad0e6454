"""What is written to, and what is read: views and frames, checked.

Owns the channel order of a view and every refusal of a view or a frame, before a byte
is written. Refuses to guess where a shape fits both orders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from shmlane.errors import TensorMismatch, UsageError
from shmlane.metadata import Array

Layout = Literal["auto", "nchw", "nhwc"]

_LAYOUTS = get_args(Layout)
CHANNELS = (1, 3, 4)
_VIEW_TYPES = tuple(map(np.dtype, ("float32", "float16", "uint8")))
_FRAME_TYPES = (*_VIEW_TYPES, np.dtype("float64"))
_ORDERS = {"nchw": "(1, C, H, W) or (C, H, W)", "nhwc": "(1, H, W, C) or (H, W, C)"}


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A view, or a rectangle of one.

    planes: channels x height x width, whatever order lies beneath. is_nchw: whether
    each plane lies in one piece.
    """

    planes: Array
    is_nchw: bool

    @property
    def pixels(self) -> Array:
        """The same memory as height x width x channels."""
        return self.planes.transpose(1, 2, 0)

    @property
    def channels(self) -> int:
        return len(self.planes)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        _, height, width = self.planes.shape
        return height, width

    def part(self, rows: slice, columns: slice = slice(None)) -> Target:
        return Target(self.planes[:, rows, columns], self.is_nchw)


def open_target(view: Array, layout: str) -> Target:
    """Check a view and find its channels."""
    if layout not in _LAYOUTS:
        raise UsageError(
            f"layout={layout!r} is not known; known are {_names(_LAYOUTS)}.",
            layout=layout,
        )
    _check_array("view", view, _VIEW_TYPES)
    if not view.flags.writeable:
        raise UsageError(
            f"the view of shape {view.shape} is read-only.",
            hint="Take it from a lease: lease[name] or lease.view(name, shape).",
        )
    image = view[0] if view.ndim == 4 and len(view) == 1 else view
    if image.ndim != 3:
        raise TensorMismatch(
            f"the view has shape {view.shape}; allowed is one image, channels first"
            f" {_ORDERS['nchw']} or last {_ORDERS['nhwc']}.",
            hint="Take one row of a batch: view[i], or stack_into(view, frames).",
            shape=view.shape,
        )
    _check_not_empty("view", view)
    is_nchw = _is_nchw(image, layout)
    return Target(image if is_nchw else image.transpose(2, 0, 1), is_nchw)


def open_frame(frame: Array) -> Array:
    """Check a frame; the same memory as height x width x channels."""
    _check_array("frame", frame, _FRAME_TYPES)
    pixels = frame[..., None] if frame.ndim == 2 else frame
    if pixels.ndim != 3 or (pixels.size and pixels.shape[2] not in CHANNELS):
        raise TensorMismatch(
            f"the frame has shape {frame.shape}; allowed are (H, W) and (H, W, C) with"
            f" {_names(CHANNELS)} channels.",
            shape=frame.shape,
        )
    _check_not_empty("frame", frame)
    return pixels


def check_pair(target: Target, pixels: Array) -> None:
    """Refuse a frame that has other channels than the view, or lies in it."""
    given, taken = pixels.shape[2], target.channels
    if given != taken:
        raise TensorMismatch(
            f"the frame has {given} channels and the view takes {taken}.",
            hint=_channel_hint(given, taken),
            given=given,
            expected=taken,
        )
    if np.may_share_memory(target.planes, pixels):
        raise UsageError(
            "frame and view lie in the same memory: pixels would be overwritten before"
            " they are read.",
            hint="Give a copy of the frame.",
        )


def check_same_size(target: Target, pixels: Array) -> None:
    if pixels.shape[:2] != target.size:
        raise TensorMismatch(
            f"the frame is {_size(pixels.shape)} and the view is {_size(target.size)}"
            " (height x width).",
            hint="Use resize_into, letterbox_into or center_crop_into.",
            given=pixels.shape[:2],
            expected=target.size,
        )


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[0]} x {shape[1]}"


def _names(known: tuple[object, ...]) -> str:
    return ", ".join(str(name) for name in known)


def _check_array(what: str, array: object, dtypes: tuple[np.dtype[Any], ...]) -> None:
    if not isinstance(array, np.ndarray):
        raise TensorMismatch(
            f"the {what} is a {type(array).__name__}, not a NumPy array.",
            hint="np.asarray makes one." if what == "frame" else "",
        )
    if array.dtype not in dtypes:
        raise TensorMismatch(
            f"the {what} has dtype {array.dtype}; allowed are {_names(dtypes)}.",
            dtype=array.dtype,
        )


def _check_not_empty(what: str, array: Array) -> None:
    if array.size == 0:
        raise TensorMismatch(
            f"the {what} is empty: it has shape {array.shape}.", shape=array.shape
        )


def _is_nchw(image: Array, layout: str) -> bool:
    fitting = [
        name
        for name, axis in (("nchw", 0), ("nhwc", 2))
        if layout in ("auto", name) and image.shape[axis] in CHANNELS
    ]
    if len(fitting) > 1:
        raise UsageError(
            f"the view of shape {image.shape} may have its channels first or last.",
            hint='Say which: layout="nchw" or layout="nhwc".',
            shape=image.shape,
        )
    if not fitting:
        raise TensorMismatch(
            f"the view of shape {image.shape} has no {_names(CHANNELS)} channels where"
            f" layout={layout!r} looks for them:"
            f" {_allowed(layout)} is allowed.",
            shape=image.shape,
        )
    return fitting == ["nchw"]


def _allowed(layout: str) -> str:
    return _ORDERS.get(layout) or " or ".join(_ORDERS.values())


def _channel_hint(given: int, taken: int) -> str:
    if given > taken == 1:
        return "Make it grey first, for example with cv2.cvtColor."
    if given > taken:
        return f"frame[..., :{taken}] leaves the last out without a copy."
    if given == 1:
        return (
            "np.broadcast_to(frame.reshape(h, w, 1), (h, w,"
            f" {taken})) repeats it without a copy."
        )
    return "Add what is missing, for example with cv2.cvtColor."
