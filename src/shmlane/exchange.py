"""One inference as a chain of decisions: prepare, begin, judge the reply.

Owns what a reply means for a slot: accepted, to be registered again, failed, or not to
be trusted. Refuses to wait and to do I/O. Holds no state of a request: that is the
slot's. Safe to use from any thread, as long as a slot belongs to one caller.

The server hold of a slot is set here before the first byte leaves, and cleared here
only: on a complete reply of Triton's to that very request, or when it did not leave.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import numpy as np

from . import elements
from .control import refusal, server_text
from .datatypes import BYTES
from .errors import (
    InferFailed,
    ModelNotReady,
    PoolClosed,
    ProtocolError,
    RequestLost,
    ServerError,
)
from .metadata import Array, ModelMetadata
from .options import RequestOptions
from .prepared import LAST_TURN, TURNS, Prepared
from .replies import HttpReply, InferReply, OutputReply
from .requests import RequestBuilding, can_grow, classes_of
from .slots import Slot
from .tensors import Tensor
from .wire import HttpRequests

_REQUEST_ID = "[request id: "
_TOO_SMALL = re.compile(
    r"for output '([^']+)' \((\d{1,18}) bytes\).* at least (\d{1,18}) bytes"
)
_NO_ELEMENT = np.empty((), object)


class Verdict(Enum):
    """What to do when there is neither a success nor an error to tell."""

    SEND_AGAIN = "the connection was dead"
    REGISTER_AGAIN = "the server did not know the registration"
    REPLAY = "the request was lost, and the server has let go of its memory"
    RUN_AGAIN = "an output did not fit, and the caller lets the model run twice"


class Answer(NamedTuple):
    """A successful inference: the checked reply, and arrays of outputs on the wire.

    request_id: the caller's own, "" if there was none.
    """

    reply: InferReply
    wire: Mapping[str, Array]
    request_id: str = ""


class Exchange:
    """The decisions of one session: one server, one model.

    rerun: whether the model may run again for one call, because an output did not fit.
    is_closed: set when the session closes; nothing new is begun from then on.
    """

    def __init__(
        self, requests: HttpRequests, metadata: ModelMetadata, *, rerun: bool = False
    ) -> None:
        self.requests = requests
        self.metadata = metadata
        self.rerun = rerun
        self.is_closed = False
        self.building = RequestBuilding(requests, rerun=rerun)

    def prepare(
        self, slot: Slot, given: int, options: RequestOptions | None = None
    ) -> None:
        """Build the request for the current shapes; `given` has the inputs' bits."""
        self.building.prepare(slot, given, options)

    @staticmethod
    def begin(slot: Slot) -> bytearray:
        """The next request of a prepared slot, which the server holds from now on."""
        prepared = slot.prepared
        assert prepared is not None
        turn = slot.turn + 1
        if turn > LAST_TURN:
            turn = 0
            prepared.stamp(slot.series + 1)
            # In this order: interrupted, the same is done again.
            slot.series += 1
        slot.turn = turn
        slot.record[0] = 1
        slot.server_hold = True
        if prepared.options is not None or slot.own_id:
            _note_id(slot, prepared)
        request = prepared.request
        if prepared.place:
            request[prepared.place] = TURNS[turn]
        return request

    @staticmethod
    def withdraw(slot: Slot) -> None:
        """The server holds the slot no more, or never began to.

        The hold goes last: a session that closes takes the memory of what is not held.
        """
        slot.record[0] = 0
        slot.server_hold = False

    @staticmethod
    def matches(slot: Slot, data: bytes) -> Answer | None:
        """The known answer if `data` is that reply, byte for byte, but of this id."""
        prepared = slot.prepared
        assert prepared is not None
        reply, place, answer = prepared.known
        reply[place] = TURNS[slot.turn]
        if data != reply or answer is None:
            return None
        slot.record[0] = 0
        slot.server_hold = False
        known: Answer = answer
        return known

    def accept(self, slot: Slot, reply: HttpReply, raw: bytes) -> Answer | Verdict:
        """Judge a complete reply; raises `ServerError`, `RequestLost`, `ProtocolError`.

        raw: the bytes that came first, to know the reply again if they are all of it.
        After `RequestLost` and `ProtocolError` the server still holds the slot.
        """
        if not reply.is_from_triton:
            raise _not_tritons(reply)
        if reply.status != 200:
            return self._refused(slot, reply)
        answer = InferReply.parse(reply)
        prepared = slot.prepared
        assert prepared is not None
        model, sent = self.metadata.name, slot.sent_id
        if answer.request_id != sent or answer.model_name != model:
            raise ProtocolError(
                f"the reply belongs to another request: id {answer.request_id!r} of"
                f" {answer.model_name!r}, sent was id {sent!r} to {model!r}."
            )
        options = prepared.options
        try:
            accepted = self._take(
                slot, prepared, answer, request_id=options.id if options else ""
            )
        finally:
            self.withdraw(slot)
        # The head alone would pass for any reply of the same length; and a connection
        # that ends with its reply is closed only if the reply is read.
        # What came over the wire comes anew each time, and memory that nobody looks at
        # is received into again.
        can_be_known = not (accepted.wire or slot.own_id) and reply.keep_alive
        if can_be_known and raw.endswith(b"\r\n\r\n" + reply.body):
            prepared.remember(slot.sent_id, raw, accepted)
        return accepted

    def check_foreign(
        self, slot: Slot, prepared: Prepared, answer: InferReply
    ) -> Answer:
        """Judge what another client was answered; the holds of the slot stay.

        Its ids are that client's affair: nothing here tells whose reply it is.
        """
        if answer.model_name != self.metadata.name:
            raise ProtocolError(
                f"the reply belongs to another request: it is of model"
                f" {answer.model_name!r}, not {self.metadata.name!r}."
            )
        return self._take(slot, prepared, answer, request_id=answer.request_id)

    def _take(
        self, slot: Slot, prepared: Prepared, answer: InferReply, *, request_id: str
    ) -> Answer:
        wire = _take_outputs(slot, prepared, answer)
        self.building.learn(slot, prepared, answer)
        return Answer(answer, wire, request_id)

    def _refused(self, slot: Slot, reply: HttpReply) -> Verdict:
        """What to do after an error of Triton's; raises what is to be told."""
        prepared = slot.prepared
        assert prepared is not None
        _check_request_id(reply, slot.sent_id)
        self.withdraw(slot)
        if _has_lost_region(reply):
            return Verdict.REGISTER_AGAIN
        if match := _TOO_SMALL.search(server_text(reply)):
            self.building.note_size(prepared, match[1], int(match[3]))
            if self.rerun and not slot.is_step and can_grow(slot, match[1]):
                return Verdict.RUN_AGAIN
        raise self._failure(reply)

    def _failure(self, reply: HttpReply) -> ServerError:
        """The error for a refusal or failure of the inference."""
        text = server_text(reply)
        if reply.status == 404 or "is not ready" in text:
            return ModelNotReady(
                f"the server cannot run model {self.metadata.name!r} now: {text}.",
                retryable=True,
                status=reply.status,
                text=text,
            )
        if match := _TOO_SMALL.search(text):
            name, given, needed = match[1], int(match[2]), int(match[3])
            spec = self.metadata.outputs.get(name)
            what = "bytes" if spec is not None and spec.is_bytes else "shape"
            return InferFailed(
                f"output {name!r} needs {needed} bytes, its block has {given}; the"
                " model has run.",
                hint="The next request has room for it. To be spared this, declare how"
                f" large it can be, outputs={{{name!r}: {what}}}, or let the model run"
                " again then, rerun=True.",
                retryable=spec is not None and not spec.is_sized,
                status=reply.status,
                text=text,
                output=name,
                needed=needed,
                given=given,
            )
        return refusal(
            reply, f"inference on {self.metadata.name!r}", otherwise=InferFailed
        )


def closed_meanwhile() -> PoolClosed:
    return PoolClosed("the session was closed meanwhile; nothing was sent.")


def _note_id(slot: Slot, prepared: Prepared) -> None:
    """A request with the caller's own id is sent once."""
    slot.own_id = prepared.options.id if prepared.options is not None else ""
    if slot.own_id:
        assert slot.channel is not None
        slot.channel.own_ids.add(slot.own_id)
        prepared.spoil()


def _check_request_id(reply: HttpReply, sent: str) -> None:
    """Errors found while a request runs begin with its id; others name none."""
    text = reply.error_text or ""
    if text.startswith(_REQUEST_ID) and not text.startswith(f"{_REQUEST_ID}{sent}] "):
        raise ProtocolError(
            f"the error belongs to another request: {text[:80]!r}, sent was id"
            f" {sent!r}."
        )


def _has_lost_region(reply: HttpReply) -> bool:
    """Found before the model runs, so sending again is always safe (protocol v2)."""
    return server_text(reply).startswith("Unable to find shared memory region")


def _take_outputs(
    slot: Slot, prepared: Prepared, answer: InferReply
) -> dict[str, Array]:
    """Check every output and give its tensor the shape; arrays of those on the wire."""
    came = {output.name: output for output in answer.outputs}
    wire: dict[str, Array] = {}
    for tensor in slot.outputs.values():
        output = came.get(tensor.name)
        if output is None:
            raise InferFailed(
                f"the server answered without output {tensor.name!r}, which was asked"
                f" for; it sent: {', '.join(came) or 'none'}.",
                output=tensor.name,
            )
        classes = classes_of(prepared.options, tensor.name)
        _check_output(tensor, output, prepared, classes=classes)
        try:
            if output.data is not None:
                wire[tensor.name] = _array(tensor, output, classes=classes)
            elif output.shape != tensor.shape:
                # Replies known by their bytes stand for the shapes of their time. They
                # go first: Ctrl-C in between must not leave one that does not fit.
                prepared.forget()
                # For BYTES no array is made yet that could refuse the shape.
                np.broadcast_to(_NO_ELEMENT, output.shape)
                tensor.reshape(output.shape)
        except (ValueError, OverflowError) as error:
            raise _misfit(tensor, output, "no array can have that shape") from error
    return wire


def _array(tensor: Tensor, output: OutputReply, *, classes: int) -> Array:
    """The array of an output that came over the wire."""
    data = output.data
    assert data is not None
    if classes or tensor.is_bytes:
        return elements.decode(data, output.shape)
    dtype = tensor.spec.dtype
    flat = np.frombuffer(data, dtype)
    # What lies crooked in the reply is slow, and not for everybody to read.
    return (flat if flat.flags.aligned else flat.copy()).reshape(output.shape)


def _check_output(
    tensor: Tensor, output: OutputReply, prepared: Prepared, *, classes: int
) -> None:
    """Refuse bytes that are not there, or not what the reply says they are."""
    wanted = BYTES if classes else tensor.spec.datatype
    room = 0 if tensor.name in prepared.wire_outputs else tensor.capacity
    place = room if output.data is None else len(output.data)
    # Elements of BYTES have their lengths in front of them: read when asked for.
    least = 4 * math.prod(output.shape)
    nbytes = least if wanted == BYTES else tensor.spec.nbytes(output.shape)
    is_exact = output.data is not None and wanted != BYTES
    fits = nbytes == place if is_exact else nbytes <= place
    if not fits or output.datatype != wanted:
        reason = f"that does not fit {place} bytes of {tensor.spec!r}"
        raise _misfit(tensor, output, reason)


def _misfit(tensor: Tensor, output: OutputReply, reason: str) -> InferFailed:
    return InferFailed(
        f"output {tensor.name!r} came as {output.datatype} {output.shape}: {reason}.",
        output=tensor.name,
        shape=output.shape,
    )


def _not_tritons(reply: HttpReply) -> RequestLost:
    via = f", Via: {reply.headers['via']}" if "via" in reply.headers else ""
    return RequestLost(
        f"something between this process and Triton answered in its place (status"
        f" {reply.status}{via}); the model may have run.",
        hint="Connect to Triton directly where you can. Send the request again if"
        " running it twice does no harm.",
        status=reply.status,
    )
