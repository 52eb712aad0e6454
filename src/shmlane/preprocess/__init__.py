"""Pictures into model inputs, straight into memory that the server reads.

What is usually four steps with a copy each (channels to the front, float, divide, copy
in) is one pass from the camera's pixels into the view of a lease::

    from shmlane.preprocess import image_into

    with session.lease() as lease:
        image_into(lease["images"], frame, swap_rb=True)
        result = lease.infer()

Uses OpenCV where it is installed (`pip install 'shmlane[preprocess]'`), else NumPy
alone. `letterbox_into` and `center_crop_into` are the usual ways to another size, and
`stack_into` fills a batch.
"""

from __future__ import annotations

from .batches import stack_into
from .images import center_crop_into, image_into, letterbox_into, resize_into
from .letterbox import Letterbox

__all__ = [
    "Letterbox",
    "center_crop_into",
    "image_into",
    "letterbox_into",
    "resize_into",
    "stack_into",
]
