"""The conversation on one connection: requests in, replies or faults out.

Owns acting on faults and keeping a connection alive or not. Refuses to know what a
request means.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from .faults import (
    Answer,
    Close,
    Delay,
    Duplicate,
    Fault,
    Garbage,
    Reset,
    Status,
    Truncate,
)
from .http import Reply, Request, RequestReader
from .listener import reset

Answering = Callable[[Request, Delay | None], Reply | None]


class Conversation:
    """One connection until its end.

    answer: the true reply, after whatever it takes; None when the server has ended.
    take_fault: called with each request as it comes.
    """

    def __init__(
        self,
        connected: socket.socket,
        *,
        answer: Answering,
        take_fault: Callable[[Request], Fault | None],
    ) -> None:
        self._socket = connected
        self._answer = answer
        self._take_fault = take_fault

    def run(self) -> None:
        """Serve until the client, a fault or the server ends it."""
        reader = RequestReader(self._socket)
        resumes = True
        while (request := reader.read(resumes=resumes)) is not None:
            fault = self._take_fault(request)
            if isinstance(fault, Close | Reset | Status | Garbage):
                goes_on, resumes = self._instead(request, fault), True
            else:
                delay = fault if isinstance(fault, Delay) else None
                reply = self._answer(request, delay)
                if reply is None:
                    return
                goes_on = self._send(*_altered(reply.pack(request), fault))
                resumes = reply.pauses
            if not goes_on or not request.keeps_alive:
                return

    def _instead(
        self, request: Request, fault: Close | Reset | Status | Garbage
    ) -> bool:
        """Do what something in between does, then let the model run all the same."""
        goes_on = False
        if isinstance(fault, Reset):
            reset(self._socket)
        elif isinstance(fault, Close):
            self._socket.close()
        elif isinstance(fault, Garbage):
            goes_on = self._send(fault.data)
        else:
            goes_on = self._send(_status(fault).pack(request))
        if isinstance(fault, Garbage) or fault.model_runs:
            goes_on &= self._answer(request, None) is not None
        return goes_on

    def _send(self, data: bytes, goes_on: bool = True) -> bool:
        try:
            self._socket.sendall(data)
        except OSError:
            # The client has left; Triton finds out no earlier.
            return False
        if not goes_on:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        return goes_on


def _altered(reply: bytes, fault: Fault | None) -> tuple[bytes, bool]:
    """What is sent in place of a true reply, and whether the connection goes on."""
    if isinstance(fault, Truncate):
        return reply[: fault.nbytes], False
    if isinstance(fault, Duplicate):
        return reply * fault.times, True
    if isinstance(fault, Answer):
        data = fault.data(reply) if callable(fault.data) else fault.data
        return data, True
    return reply, True


def _status(fault: Status) -> Reply:
    body = fault.body.encode() if isinstance(fault.body, str) else fault.body
    headers = {name.title(): value for name, value in fault.headers.items()}
    kind = headers.pop("Content-Type", "text/plain")
    return Reply(fault.code, body, kind, tuple(headers.items()))
