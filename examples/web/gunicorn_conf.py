"""gunicorn with preforked workers: each opens a session of its own after the fork.

    python -m gunicorn -c python:examples.web.gunicorn_conf \
        examples.web.django_app:application

Owns the workers' numbers and the hooks that open and close their sessions. Refuses to
touch a session in the process that forks.
"""

from __future__ import annotations

import logging
import os
from typing import Protocol

import shmlane

from . import settings, worker_session


class Worker(Protocol):
    """A worker of gunicorn's, as far as it is used here."""

    pid: int
    log: logging.Logger


bind = os.environ.get("BIND", "127.0.0.1:8080")
workers = int(os.environ.get("WORKERS", "2"))
# More than slots: somebody must be left to tell how it is, and who comes too many that
# the house is full, while all slots wait for the model.
threads = 2 * settings.SLOTS
# The application is loaded once and forked; the session in it is not open then.
preload_app = True
# Longer than one request may take with all its waiting, shorter than patience.
timeout = 30
graceful_timeout = 15


def post_worker_init(worker: Worker) -> None:
    """In the worker, before its first request: have the memory ready by then.

    Without Triton the worker starts all the same, says so to its clients, and opens the
    session with the first request that finds Triton back.
    """
    try:
        worker_session.session.open()
        worker_session.session.warmup()
    except shmlane.ShmlaneError as error:
        worker.log.warning("no session yet: %s", error)


def worker_exit(server: object, worker: Worker) -> None:
    """Give the memory back. gunicorn calls this in the forking process too."""
    if worker.pid == os.getpid():
        worker_session.session.close()
