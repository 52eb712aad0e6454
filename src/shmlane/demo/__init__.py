"""The first thing a stranger sees: real networks, real pictures, real numbers.

Owns the check that the optional packages of the demo are there. Refuses to start and
fail half way for want of one of them.
"""

from __future__ import annotations

from importlib.util import find_spec

from shmlane.errors import ExtraMissing

_NEEDED = ("rich", "cv2", "matplotlib")


def require_extras() -> None:
    """Raise `ExtraMissing` with one command that installs all that is missing."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ExtraMissing(
            f"the demo needs {', '.join(missing)}, not installed here.",
            hint="Install with: pip install 'shmlane[all]'",
            missing=missing,
        )
