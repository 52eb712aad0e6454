"""A server made of words: models, replies as bytes, and a channel that plays them.

Owns what the tests of the middle layers share: memory without a session, scripted
replies, and the driver of a talk. Refuses to open sockets and to start threads.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import pytest

from shmlane.control import Pause, Talk
from shmlane.exchange import Answer, Exchange, Verdict
from shmlane.layout import SlotLayout
from shmlane.leases import BaseLease, Result
from shmlane.memory import SessionMemory
from shmlane.metadata import Array, ModelMetadata, Shape, TensorSpec
from shmlane.prepared import id_of
from shmlane.regions import RegionOptions
from shmlane.replies import HttpReply, ReplyParser
from shmlane.slots import Holder, Slot
from shmlane.tensors import Tensor
from shmlane.timing import Deadline
from shmlane.wire import HttpRequests

T = TypeVar("T")
Event = bytes | BaseException | Callable[[bytes], bytes]

MODEL = "m"
REQUESTS = HttpRequests("here:8000", MODEL)
SMALL = RegionOptions(hugepages="never", prefault=False)

# --- models and their memory ----------------------------------------------------------


def model(
    inputs: Iterable[TensorSpec],
    outputs: Iterable[TensorSpec],
    *,
    server_version: str = "2.51.0",
) -> ModelMetadata:
    return ModelMetadata(
        name=MODEL,
        versions=("1",),
        platform="scripted",
        inputs={spec.name: spec for spec in inputs},
        outputs={spec.name: spec for spec in outputs},
        max_batch_size=0,
        server_version=server_version,
    )


# One input and one output of four numbers.
PLAIN = model([TensorSpec("X", "FP32", (1, 4))], [TensorSpec("Y", "FP32", (1, 4))])

# Any number of numbers in and out; the caller says how many.
OPEN = model([TensorSpec("X", "FP32", (-1,))], [TensorSpec("Y", "FP32", (-1,))])

# Batches of up to eight rows; MARK may be left out.
ROWS = model(
    [
        TensorSpec("X", "FP32", (-1, 3), False, 8),
        TensorSpec("MARK", "INT8", (-1, 2), True, 8),
    ],
    [TensorSpec("SUM", "FP32", (-1, 1), False, 8)],
)


def memory(
    metadata: ModelMetadata = PLAIN,
    *,
    shapes: Mapping[str, Shape] | None = None,
    outputs: Iterable[str] | Mapping[str, Shape] | None = None,
    options: RegionOptions = SMALL,
) -> SessionMemory:
    """Real shared memory; it goes away with the last reference to it."""
    layout = SlotLayout.plan(metadata, shapes=shapes, outputs=outputs)
    return SessionMemory(layout, options=options, server="scripted", model=MODEL)


def view_of(tensor: Tensor) -> Array:
    """A view as leases and results hand it out."""
    view: Array = tensor.array[...]
    return view


# --- replies --------------------------------------------------------------------------


def http(status: int, body: bytes | str = b"", **headers: object) -> bytes:
    """A reply as Triton frames it; `inference_header` in names becomes dashes."""
    data = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status} Words", f"Content-Length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "\r\n"]).encode() + data


def error(status: int, text: str, **headers: object) -> bytes:
    """A refusal in Triton's form."""
    return http(status, json.dumps({"error": text}), **headers)


def output(
    name: str, shape: Iterable[int], *, datatype: str = "FP32", wire: int | None = None
) -> dict[str, Any]:
    """One output of an inference reply; `wire` bytes of it come behind the JSON."""
    told = {"name": name, "datatype": datatype, "shape": list(shape)}
    return told if wire is None else told | {"parameters": {"binary_data_size": wire}}


# Where slots count from OTHER_ID (`counted_ids`), the first that each sends has the
# other id.
SERIES = 1 << 50
OTHER_ID, FIRST_ID = id_of(SERIES, 0), id_of(SERIES, 1)
# How an error begins that was found while the request ran.
OF_FIRST = f"[request id: {FIRST_ID}]"


def success(
    request_id: str,
    *outputs: Mapping[str, Any],
    blobs: bytes = b"",
    name: str = MODEL,
    **headers: object,
) -> bytes:
    """A successful inference, as the server reports it."""
    answer = {"model_name": name, "model_version": "1", "outputs": list(outputs)}
    text = json.dumps({"id": request_id, **answer})
    if blobs:
        headers["Inference_Header_Content_Length"] = len(text)
    return http(200, text.encode() + blobs, **headers)


def parsed(data: bytes) -> HttpReply:
    """What a connection makes of these bytes."""
    reply = ReplyParser().feed(data)
    assert reply is not None
    return reply


# --- requests -------------------------------------------------------------------------


class Request(NamedTuple):
    """What a server reads of a request."""

    line: str
    body: Any

    @classmethod
    def read(cls, data: bytes | bytearray) -> Request:
        head, _, body = data.partition(b"\r\n\r\n")
        line = head.split(b"\r\n")[0].decode()
        return cls(line.removesuffix(" HTTP/1.1"), json.loads(body) if body else None)


def request_id(request: bytes | bytearray) -> str:
    """The id of an inference request, to answer it."""
    return str(Request.read(request).body["id"])


# --- a server that follows a script ---------------------------------------------------


def in_turn(*replies: bytes) -> Callable[[bytes], bytes]:
    """Answer with one reply after the other, whatever is asked."""
    left = deque(replies)

    def answer(request: bytes) -> bytes:
        if not left:
            pytest.fail(f"nothing is scripted for {Request.read(request)}")
        return left.popleft()

    return answer


class Script:
    """Drives a talk against scripted replies and notes what was said."""

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self._answer = answer
        self.asked: list[Request] = []
        self.pauses: list[float] = []

    @property
    def lines(self) -> list[str]:
        return [request.line for request in self.asked]

    def run(self, talk: Talk[T]) -> T:
        reply: HttpReply | None = None
        while True:
            try:
                step = talk.send(reply)
            except StopIteration as done:
                result: T = done.value
                return result
            if isinstance(step, Pause):
                self.pauses.append(step.seconds)
                reply = None
            else:
                self.asked.append(Request.read(step))
                reply = parsed(self._answer(step))


class ScriptedChannel:
    """A connection whose other end is a list of events; see `slots.Channel`.

    An event is what `receive` gives next: bytes, an error to raise, or a function that
    makes the bytes from the last request. Without events left, nothing has come yet.
    """

    def __init__(self, *events: Event) -> None:
        self.events = deque(events)
        self.sent: list[bytes] = []
        self.own_ids: set[str] = set()
        self.is_open = True
        self.is_quiet = True
        self._parser = ReplyParser()

    def comes_within(self, seconds: float) -> bool:
        return bool(self.events)

    def send(self, request: bytes | bytearray) -> bool:
        if self.is_open:
            self.sent.append(bytes(request))
        return self.is_open

    def send_parts(
        self, parts: Sequence[bytearray | memoryview], deadline: Deadline
    ) -> bool:
        return self.send(b"".join(parts))

    def receive(self, timeout: float | None) -> bytes:
        if not self.events:
            pytest.fail("nothing is scripted to come")
        event = self.events.popleft()
        if isinstance(event, BaseException):
            raise event
        return event if isinstance(event, bytes) else event(self.sent[-1])

    def receive_now(self) -> bytes | None:
        return self.receive(0) if self.events else None

    def advance(self) -> HttpReply | None:
        data = self.receive_now()
        return None if data is None else self.feed(data)

    def feed(self, data: bytes) -> HttpReply | None:
        reply = self._parser.feed(data)
        if reply is not None:
            self._parser = ReplyParser()
        return reply

    def finish(self, data: bytes, deadline: Deadline) -> HttpReply:
        while (reply := self.feed(data)) is None:
            data = self.receive(deadline.remaining)
        return reply

    def call(self, request: bytes, deadline: Deadline) -> HttpReply:
        self.send(request)
        return self.finish(self.receive(deadline.remaining), deadline)

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self.is_open = False


# --- what a session adds to a lease ---------------------------------------------------


class Host:
    """The part of a session that a lease needs, over a scripted channel."""

    def __init__(self, metadata: ModelMetadata, memory: SessionMemory) -> None:
        self.memory = memory
        self.exchange = Exchange(REQUESTS, metadata)
        self.returned: list[Slot] = []

    def _why_unusable(self) -> None:
        """Nothing about this host keeps a lease from being used."""

    def _give_back(self, lease: Holder) -> None:
        slot: Slot = lease._hold[1]
        lease._hold.clear()
        slot.epoch += 1
        slot.leased = False
        self.returned.append(slot)

    def _grow(self, slot: Slot, tensor: Tensor, nbytes: int) -> None:
        self.memory.grow(slot, tensor, nbytes)

    def infer(self, slot: Slot, given: int, *outputs: Mapping[str, Any]) -> Result:
        """One inference whose reply tells of `outputs`."""
        slot.epoch += 1
        if slot.prepared is None or slot.prepared.given != given:
            self.exchange.prepare(slot, given)
        answer = answered(self.exchange, slot, *outputs)
        assert isinstance(answer, Answer)
        return Result(slot, slot.epoch, answer)


class Lease(BaseLease):
    """A lease that infers as that of a session does, against a scripted reply."""

    __slots__ = ()
    _host: Host

    def infer(self, *outputs: Mapping[str, Any]) -> Result:
        slot, given = self._slot, self._given
        if slot is None or slot.server_hold or given & slot.required != slot.required:
            raise self._not_ready(slot)
        return self._host.infer(slot, given, *outputs)


class Desk:
    """Takes leases of one slot, one after the other."""

    def __init__(self, metadata: ModelMetadata, **plan: Any) -> None:
        self.host = Host(metadata, memory(metadata, **plan))
        (self.slot,) = self.host.memory.make_slots(1)

    def lease(self) -> Lease:
        assert not self.slot.leased
        lease = Lease(self.host)
        lease._hold[1] = self.slot
        lease._begin()
        return lease

    @property
    def request(self) -> Any:
        """The body of the request that is prepared."""
        prepared = self.slot.prepared
        assert prepared is not None
        return Request.read(prepared.request).body


def answered(
    exchange: Exchange, slot: Slot, *outputs: Mapping[str, Any], **told: Any
) -> Answer | Verdict:
    """Send the next request of a prepared slot and take in a success."""
    data = success(request_id(exchange.begin(slot)), *outputs, **told)
    known = exchange.matches(slot, data)
    return known if known is not None else exchange.accept(slot, parsed(data), data)
