"""A Django project in one file: POST a picture to /survey, and GET /healthz.

    python -m gunicorn --threads 8 examples.web.django_app:application

Owns its settings, its two views and how errors become replies. Refuses to open the
session while it is imported: the process may still be forked.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from django import conf  # type: ignore[import-untyped]
from django.core.exceptions import (  # type: ignore[import-untyped]
    RequestDataTooBig,
)
from django.core.wsgi import get_wsgi_application  # type: ignore[import-untyped]
from django.http import HttpRequest, JsonResponse  # type: ignore[import-untyped]
from django.urls import path  # type: ignore[import-untyped]
from django.views.decorators.http import (  # type: ignore[import-untyped]
    require_GET,
    require_POST,
)

from . import settings, worker_session
from .pictures import decode, put, report
from .problems import BodyTooLarge, problem_of

conf.settings.configure(
    ALLOWED_HOSTS=["localhost", "127.0.0.1"],
    ROOT_URLCONF=__name__,
    MIDDLEWARE=[f"{__name__}.Problems"],
    DATA_UPLOAD_MAX_MEMORY_SIZE=settings.MAX_BYTES,
)


class Problems:
    """Errors of a view as JSON, with the status that is true."""

    def __init__(self, get_response: Callable[[HttpRequest], JsonResponse]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> JsonResponse:
        return self._get_response(request)

    def process_exception(self, _: HttpRequest, error: Exception) -> JsonResponse:
        if isinstance(error, RequestDataTooBig):
            error = BodyTooLarge()
        problem = problem_of(error)
        return JsonResponse(
            problem.body, status=problem.status, headers=problem.headers
        )


def _survey(request: HttpRequest) -> JsonResponse:
    # All of the body is here, and decoded, before a slot is taken: a slow client keeps
    # a thread from others, but no slot.
    picture = decode(request.body)
    with worker_session.session.lease() as lease:
        put(lease["PICTURE"], picture)
        found = report(lease.infer())
    return JsonResponse(found, headers={"X-Worker": str(os.getpid())})


def _healthz(request: HttpRequest) -> JsonResponse:
    stats = dataclasses.asdict(worker_session.session.stats())
    return JsonResponse({"worker": os.getpid(), "slots": stats})


urlpatterns = [
    path("survey", require_POST(_survey)),
    path("healthz", require_GET(_healthz)),
]

application = get_wsgi_application()
