"""Looks at pictures: what colour they are on average, and where they are brightest.

Runs in Triton's Python backend. Its answers can be checked by whoever drew the picture.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

# The picture is cut into so many columns, and as many rows.
_CELLS = 8


class TritonPythonModel:
    """Answers with the mean of red, green and blue, 0 to 255, and with x and y.

    x and y are the middle of the brightest cell, as shares of width and height.
    """

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        tensor = pb_utils.get_input_tensor_by_name(request, "PICTURE")
        pictures = tensor.as_numpy()
        count, colours, height, width = pictures.shape
        cells = pictures.reshape(
            count, colours, _CELLS, height // _CELLS, _CELLS, width // _CELLS
        ).mean(axis=(3, 5))
        colour = cells.mean(axis=(2, 3)) * 255
        brightest = cells.sum(axis=1).reshape(count, -1).argmax(axis=1)
        place = np.stack([brightest % _CELLS, brightest // _CELLS], axis=1)
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("COLOUR", colour.astype(np.float32)),
                pb_utils.Tensor("BRIGHTEST", ((place + 0.5) / _CELLS).astype("f4")),
            ]
        )
