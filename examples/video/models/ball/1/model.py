"""Triton Python backend that finds one orange ball, standing in for a real detector.

Owns where the ball is: left, top, right, bottom in pixels of the input, and how much of
this box it fills, 0 where no ball is. Takes red, green and blue from 0 to 1, channels
first. Refuses to learn: what counts is colour alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

# By how much red must outshine green and blue: compressed greys never do.
_ORANGE = 0.3


class TritonPythonModel:
    """Answers every frame by itself; it remembers none."""

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        image = pb_utils.get_input_tensor_by_name(request, "images").as_numpy()
        ball = pb_utils.Tensor("ball", find_ball(image))
        return pb_utils.InferenceResponse([ball])


def find_ball(image: Any) -> Any:
    """The box around all orange pixels, and the share of them in it."""
    red, green, blue = image
    orange = red - np.maximum(green, blue) > _ORANGE
    rows = np.flatnonzero(orange.any(axis=1))
    columns = np.flatnonzero(orange.any(axis=0))
    if not rows.size:
        return np.zeros(5, np.float32)
    left, top, right, bottom = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
    share = orange.sum() / ((right - left) * (bottom - top))
    return np.array([left, top, right, bottom, share], np.float32)
