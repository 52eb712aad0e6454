"""gunicorn whose workers share one region, which the process that forks has made.

    python -m gunicorn -c python:examples.web.gunicorn_shared \
        examples.web.django_app:application

Memory is made and registered once, whichever workers come and go; each claims slots of
it for as long as it lives. Triton must be there when gunicorn starts. A session for
each worker (`gunicorn_conf`) needs less thought, and is what most services want.

Owns the shared slots. Refuses to infer in the process that forks.
"""

from __future__ import annotations

import shmlane

from . import settings, worker_session
from .gunicorn_conf import (
    Worker,
    bind,
    graceful_timeout,
    preload_app,
    threads,
    timeout,
    worker_exit,
    workers,
)

__all__ = [
    "bind",
    "graceful_timeout",
    "on_exit",
    "post_worker_init",
    "preload_app",
    "threads",
    "timeout",
    "when_ready",
    "worker_exit",
    "workers",
]

# A worker may come while the one that it replaces still ends.
_SLOTS = (workers + 1) * settings.SLOTS
_START_TIMEOUT = 30.0

_owner = shmlane.Session(
    settings.URL,
    settings.MODEL,
    slots=1,
    shapes=settings.SHAPES,
    timeouts=settings.TIMEOUTS,
)
_handle: shmlane.SessionHandle | None = None


def when_ready(server: object) -> None:
    """Before the first fork: make the slots. Only their name crosses it."""
    global _handle
    _handle = _owner.open(wait=_START_TIMEOUT).share(slots=_SLOTS)


def post_worker_init(worker: Worker) -> None:
    """In the worker, before its first request: claim slots, or make some of its own."""
    assert _handle is not None
    try:
        worker_session.session = shmlane.Session.attach(
            _handle, slots=settings.SLOTS, timeouts=settings.TIMEOUTS
        ).open()
    except shmlane.ShmlaneError as error:
        # Too many workers at once: the session that is there opens when it is used.
        worker.log.warning("no shared slots: %s", error)


def on_exit(server: object) -> None:
    """When all workers have ended: take the slots back."""
    _owner.close()
