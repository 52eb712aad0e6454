"""The session of this process, for services whose workers are threads or forks.

Owns one `shmlane.Session`, which is made here and not opened: it may be imported
before a fork, and opens in each worker with the first request, or when a hook of the
server says so. All threads of the worker share it. Refuses to be opened by whoever
imports it.
"""

from __future__ import annotations

import shmlane

from . import settings

session = shmlane.Session(
    settings.URL,
    settings.MODEL,
    slots=settings.SLOTS,
    shapes=settings.SHAPES,
    timeouts=settings.TIMEOUTS,
)
