"""A FastAPI service on one event loop: POST a picture to /survey, and GET /healthz.

    python -m uvicorn examples.web.fastapi_app:app

Owns one `shmlane.AsyncSession` for each process, from its start to its end, and how
errors become replies. Refuses to keep the loop from other requests: pictures are
decoded and resized in threads, and waiting costs none.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

import shmlane

from . import settings
from .pictures import NotAPicture, decode, put, report
from .problems import BodyTooLarge, problem_of


@contextlib.asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, shmlane.AsyncSession]]:
    """Make the session in the loop that serves; close it when the last reply is out.

    Without Triton the service starts all the same, says so to its clients, and opens
    the session with the first request that finds Triton back.
    """
    session = shmlane.AsyncSession(
        settings.URL,
        settings.MODEL,
        slots=settings.SLOTS,
        shapes=settings.SHAPES,
        timeouts=settings.TIMEOUTS,
    )
    with contextlib.suppress(shmlane.ServerUnreachable, shmlane.ModelNotReady):
        await session.open()
    try:
        yield {"session": session}
    finally:
        await session.close()


def _session(request: Request) -> shmlane.AsyncSession:
    session: shmlane.AsyncSession = request.state.session
    return session


Session = Annotated[shmlane.AsyncSession, Depends(_session)]
app = FastAPI(lifespan=lifespan)


@app.exception_handler(shmlane.ShmlaneError)
@app.exception_handler(NotAPicture)
@app.exception_handler(BodyTooLarge)
async def _problem(_: Request, error: Exception) -> JSONResponse:
    problem = problem_of(error)
    return JSONResponse(problem.body, problem.status, problem.headers)


async def _body(request: Request) -> bytes:
    """All that the client sends, if it is not too much."""
    if int(request.headers.get("content-length", 0)) > settings.MAX_BYTES:
        raise BodyTooLarge
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > settings.MAX_BYTES:
                raise BodyTooLarge
    except ClientDisconnect as gone:
        raise NotAPicture("the client left before its picture was here") from gone
    return bytes(body)


@app.post("/survey")
async def survey(request: Request, session: Session) -> dict[str, list[float]]:
    """The mean colour of a picture, and where it is brightest."""
    # All of the body is here, and decoded, before a slot is taken: a slow client keeps
    # no slot from others.
    picture = await asyncio.to_thread(decode, await _body(request))
    async with session.lease() as lease:
        await asyncio.to_thread(put, lease["PICTURE"], picture)
        return report(await lease.infer())


@app.get("/healthz")
async def healthz(session: Session) -> dict[str, Any]:
    """Who answers, and what its slots are doing."""
    return {"worker": os.getpid(), "slots": dataclasses.asdict(session.stats())}
