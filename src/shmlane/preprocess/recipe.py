"""From a pixel's value to the tensor's: scale, mean, standard deviation, channel order.

Owns the arithmetic `(value * scale - mean) / std`, folded into one factor and one
addend per channel. Refuses numbers that give no value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmlane.errors import UsageError
from shmlane.metadata import Array

PerChannel = float | Sequence[float] | Array
Numbers = tuple[float, ...]

_EIGHT_BITS = 1 / 255
_LARGEST = float(np.finfo(np.float32).max)
_PLAIN = (0, 1, 2, 3)
_SWAPPED = (2, 1, 0, 3)


@dataclass(frozen=True, slots=True)
class Recipe:
    """tensor value = factor * pixel value + addend, for each channel of the view.

    factors, addends: in the order of the view's channels. order: the channel of the
    frame that each of them is made from.
    """

    factors: Numbers
    addends: Numbers
    order: tuple[int, ...]

    @property
    def is_uniform(self) -> bool:
        """Whether every channel has the same numbers."""
        return len(set(zip(self.factors, self.addends, strict=True))) == 1

    def apply(self, colour: PerChannel) -> Array:
        """The tensor values of one colour, given in the frame's channel order."""
        values = per_channel("fill", colour, len(self.order))
        made = [
            values[source] * factor + addend
            for source, factor, addend in zip(
                self.order, self.factors, self.addends, strict=True
            )
        ]
        return np.array(made, np.float32)


def make_recipe(
    dtype: np.dtype[Any],
    channels: int,
    *,
    scale: float | None,
    mean: PerChannel | None,
    std: PerChannel | None,
    swap_rb: bool,
) -> Recipe:
    """Check and fold the options of a call for a view of that dtype."""
    if scale is None:
        scale = 1.0 if dtype == np.uint8 else _EIGHT_BITS
    (factor,) = per_channel("scale", scale, 1)
    means = per_channel("mean", 0.0 if mean is None else mean, channels)
    spread = per_channel("std", 1.0 if std is None else std, channels)
    if 0 in spread:
        raise UsageError(f"std={std!r} has a zero; no value can be divided by it.")
    if swap_rb and channels == 1:
        raise UsageError("swap_rb=True needs red and blue; the view has 1 channel.")
    factors = tuple(factor / each for each in spread)
    addends = tuple(-mid / each for mid, each in zip(means, spread, strict=True))
    if max(map(abs, factors + addends)) > _LARGEST:
        raise UsageError(
            f"scale={scale!r}, mean={mean!r}, std={std!r}: too large for float32 once"
            " divided by std."
        )
    return Recipe(factors, addends, (_SWAPPED if swap_rb else _PLAIN)[:channels])


def per_channel(name: str, given: PerChannel, channels: int) -> Numbers:
    """`given` as one number for each channel."""
    values = _numbers(given)
    if len(values) not in (1, channels) or not all(map(math.isfinite, values)):
        raise _bad_numbers(name, given, channels)
    return values * channels if len(values) == 1 else values


def _numbers(given: PerChannel) -> Numbers:
    """None at all for what is no number and no row of numbers."""
    if isinstance(given, float | int):
        return (float(given),)
    try:
        array = np.asarray(given)
    except ValueError:
        return ()
    if array.dtype.kind not in "iuf" or array.ndim > 1:
        return ()
    return tuple(array.astype(np.float64).reshape(-1).tolist())


def _bad_numbers(name: str, given: object, channels: int) -> UsageError:
    allowed = "one" if channels == 1 else f"one, or one for each of {channels} channels"
    return UsageError(
        f"{name}={given!r} is not usable; allowed are finite numbers, {allowed}.",
        option=name,
        given=given,
    )
