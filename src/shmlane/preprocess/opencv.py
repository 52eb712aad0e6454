"""The one place that imports OpenCV, on first use and never before.

Owns whether it is there. Refuses to fail without it, unless it is asked for something
that only OpenCV does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from shmlane.errors import ExtraMissing


@cache
def opencv() -> Any | None:
    """The module `cv2`, or None where it is not installed or does not load."""
    try:
        import cv2
    except ImportError:
        return None
    return cv2


def opencv_for(purpose: str) -> Any:
    """The module `cv2`; raises `ExtraMissing`, which names `purpose`, without it."""
    cv2 = opencv()
    if cv2 is None:
        raise ExtraMissing(
            f"{purpose} needs OpenCV, which is not installed.",
            hint="Install it: pip install 'shmlane[preprocess]'.",
            extra="preprocess",
        )
    return cv2
