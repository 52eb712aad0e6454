"""The classification extension: the best classes in the place of an output.

Owns the ranking and the text of a class (Triton's classification.cc). Refuses labels,
which scripted models have none of.
"""

from __future__ import annotations

import numpy as np

from ..metadata import Array
from .codec import BYTES, datatype_of
from .http import refused


def ranked(array: Array, classes: int, *, is_batched: bool) -> Array:
    """BYTES "score:index" of the `classes` largest values, for each batch item."""
    if datatype_of(array) in (BYTES, "BOOL", "FP16", "BF16"):
        # A real server dies of some of these; a test must not get that far.
        raise refused(400, "class result not available for output due to unsupported")
    rows = array.reshape(len(array) if is_batched else 1, -1)
    order = np.argsort(-rows.astype(np.float64), axis=1, kind="stable")[:, :classes]
    best = np.empty(order.shape, object)
    for place, index in np.ndenumerate(order):
        best[place] = _text(rows[place[0], index], int(index)).encode()
    return best if is_batched else best[0]


def _text(score: np.generic, index: int) -> str:
    shown = f"{score:f}" if score.dtype.kind == "f" else f"{score}"
    return f"{shown}:{index}"
