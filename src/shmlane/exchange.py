"""One inference as a chain of decisions: prepare, begin, judge the reply.

Owns what a reply means for a slot: accepted, to be registered again, failed, or not to
be trusted. Refuses to wait and to do I/O. Holds no state of a request: that is the
slot's. Safe to use from any thread, as long as a slot belongs to one caller.

The server hold of a slot is set here before the first byte leaves, and cleared here
only: on a complete reply of Triton's to that very request, or when it did not leave.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import numpy as np

from .control import refusal, server_text
from .errors import (
    InferFailed,
    ModelNotReady,
    ProtocolError,
    RequestLost,
    ServerError,
)
from .metadata import Array, ModelMetadata, Shape
from .replies import HttpReply, InferReply, OutputReply
from .slots import Prepared, Slot
from .tensors import Tensor
from .wire import HttpRequests, TensorRef

_REQUEST_ID = re.compile(r"\[request id: ([^\]]*)\] ")
_TOO_SMALL = re.compile(r"for output '([^']+)' \((\d+) bytes\).* at least (\d+) bytes")


class Verdict(Enum):
    """What to do when there is neither a success nor an error to tell."""

    SEND_AGAIN = "the connection was dead"
    REGISTER_AGAIN = "the server did not know the registration"
    REPLAY = "the request was lost, and the server has let go of its memory"


class Answer(NamedTuple):
    """A successful inference: the checked reply, and arrays of outputs on the wire."""

    reply: InferReply
    wire: Mapping[str, Array]


class Exchange:
    """The decisions of one session: one server, one model."""

    def __init__(self, requests: HttpRequests, metadata: ModelMetadata) -> None:
        self.requests = requests
        self.metadata = metadata

    def prepare(self, slot: Slot, given: int) -> None:
        """Build both requests for the current shapes; `given` has the inputs' bits."""
        inputs = [
            _reference(tensor, tensor.shape)
            for tensor in slot.inputs.values()
            if tensor.bit & given
        ]
        batch = _batch(slot, given)
        outputs = [
            _reference(tensor, _output_shape(tensor, batch), capacity=True)
            for tensor in slot.outputs.values()
        ]
        first = self.requests.infer("0", inputs, outputs)
        second = self.requests.infer("1", inputs, outputs)
        wire = frozenset(output.name for output in outputs if not output.region)
        slot.prepared = Prepared((first, second), given=given, wire=wire)

    @staticmethod
    def outgrown(slot: Slot, given: int) -> list[tuple[Tensor, int]]:
        """Outputs whose block is too small for this batch, and the bytes they need."""
        batch = _batch(slot, given)
        sizes = [
            (tensor, tensor.spec.nbytes(shape))
            for tensor in slot.outputs.values()
            if (shape := _output_shape(tensor, batch)) is not None
        ]
        return [
            (tensor, nbytes) for tensor, nbytes in sizes if nbytes > tensor.capacity
        ]

    @staticmethod
    def begin(slot: Slot) -> bytes:
        """The next request of a prepared slot, which the server holds from now on."""
        prepared = slot.prepared
        assert prepared is not None
        slot.turn = turn = slot.turn ^ 1
        slot.record[0] = 1
        slot.server_hold = True
        return prepared.requests[turn]

    @staticmethod
    def withdraw(slot: Slot) -> None:
        """The server holds the slot no more, or never began to.

        The hold goes last: a session that closes takes the memory of what is not held.
        """
        slot.record[0] = 0
        slot.server_hold = False

    @staticmethod
    def matches(slot: Slot, data: bytes) -> Answer | None:
        """The known answer if `data` is, byte for byte, the reply that was checked."""
        prepared = slot.prepared
        assert prepared is not None
        turn = slot.turn
        if data != prepared.replies[turn]:
            return None
        slot.record[0] = 0
        slot.server_hold = False
        answer: Answer = prepared.answers[turn]
        return answer

    def accept(self, slot: Slot, reply: HttpReply, raw: bytes) -> Answer | Verdict:
        """Judge a complete reply; raises `ServerError`, `RequestLost`, `ProtocolError`.

        raw: the bytes that came first, to know the reply again if they are all of it.
        After `RequestLost` and `ProtocolError` the server still holds the slot.
        """
        if not reply.is_from_triton:
            raise _not_tritons(reply)
        if reply.status != 200:
            _check_request_id(reply, slot.turn)
            self.withdraw(slot)
            if _has_lost_region(reply):
                return Verdict.REGISTER_AGAIN
            raise self._failure(reply)
        answer = InferReply.parse(reply)
        prepared = slot.prepared
        assert prepared is not None
        model = self.metadata.name
        if answer.request_id != str(slot.turn) or answer.model_name != model:
            raise ProtocolError(
                f"the reply belongs to another request: id {answer.request_id!r} of"
                f" {answer.model_name!r}, sent was id {slot.turn} to {model!r}."
            )
        try:
            wire = _take_outputs(slot, prepared, answer)
        finally:
            self.withdraw(slot)
        accepted = Answer(answer, wire)
        # The head alone would pass for any reply of the same length; and a connection
        # that ends with its reply is closed only if the reply is read.
        is_whole = reply.keep_alive and raw.endswith(b"\r\n\r\n" + reply.body)
        known = raw if is_whole and not wire else b""
        prepared.remember(slot.turn, known, accepted)
        return accepted

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
            return InferFailed(
                f"output {name!r} needs {needed} bytes, its block has {given}; the"
                " model has run.",
                hint=f"Declare its largest shape: outputs={{{name!r}: shape}}.",
                status=reply.status,
                text=text,
                output=name,
                needed=needed,
                given=given,
            )
        return refusal(
            reply, f"inference on {self.metadata.name!r}", otherwise=InferFailed
        )


def _check_request_id(reply: HttpReply, turn: int) -> None:
    """Errors found while a request runs begin with its id; others name none."""
    match = _REQUEST_ID.match(reply.error_text or "")
    if match is not None and match[1] != str(turn):
        raise ProtocolError(
            f"the error belongs to another request: id {match[1]!r}, sent was id"
            f" {turn}."
        )


def _has_lost_region(reply: HttpReply) -> bool:
    """Found before the model runs, so sending again is always safe (protocol v2)."""
    return server_text(reply).startswith("Unable to find shared memory region")


def _batch(slot: Slot, given: int) -> int:
    """Requests of one batching model have one first dimension in common."""
    for tensor in slot.inputs.values():
        if tensor.bit & given and tensor.shape:
            return tensor.shape[0]
    return 1


def _output_shape(tensor: Tensor, batch: int) -> Shape | None:
    """The largest shape that this output can have in a request of that batch size."""
    spec = tensor.spec
    if spec.is_fixed:
        return spec.shape
    if spec.is_fixed_but_for_batch:
        return (batch, *spec.shape[1:])
    return tensor.default


def _reference(
    tensor: Tensor, shape: Shape | None, *, capacity: bool = False
) -> TensorRef:
    """Where a tensor lies; without a region what is empty or may not fit."""
    nbytes = 0 if shape is None else tensor.spec.nbytes(shape)
    fits = 0 < nbytes <= tensor.capacity
    return TensorRef(
        tensor.name,
        tensor.spec.datatype,
        shape or (),
        tensor.registration.name if fits else "",
        tensor.offset,
        tensor.capacity if capacity else nbytes,
    )


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
        _check_output(tensor, output, on_wire=tensor.name in prepared.wire)
        try:
            if output.data is not None:
                flat = np.frombuffer(output.data, tensor.spec.dtype)
                wire[tensor.name] = flat.reshape(output.shape)
            elif output.shape != tensor.shape:
                # Replies known by their bytes stand for the shapes of their time. They
                # go first: Ctrl-C in between must not leave one that does not fit.
                prepared.forget()
                tensor.reshape(output.shape)
        except (ValueError, OverflowError) as error:
            raise _misfit(tensor, output, "no array can have that shape") from error
    return wire


def _check_output(tensor: Tensor, output: OutputReply, *, on_wire: bool) -> None:
    """Refuse bytes that are not there, or not what the reply says they are."""
    nbytes = tensor.spec.nbytes(output.shape)
    if output.data is not None:
        place, fits = len(output.data), nbytes == len(output.data)
    else:
        place = 0 if on_wire else tensor.capacity
        fits = nbytes <= place
    if not fits or output.datatype != tensor.spec.datatype:
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
        hint="Connect to Triton directly: shared memory needs the same host anyway.",
        status=reply.status,
    )
