"""A slot's memory for requests that tritonclient sends: its objects and its replies.

Owns what tritonclient is handed, and when such a request is over. That request cannot
be seen from here: the server holds the slot from before its memory is named to the
other client until that client's reply is handed back. A lease that ends without one
leaves a lost slot, which is drained. Refuses to send anything. The one place that
imports tritonclient, on first use and never before.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from .datatypes import BYTES
from .elements import Elements, decode
from .errors import ExtraMissing, LeaseExpired, ProtocolError, UsageError
from .exchange import Exchange
from .leases import Result
from .metadata import Array, Shape
from .prepared import Prepared
from .replies import InferReply, OutputReply
from .requests import is_open
from .slots import Slot
from .tensors import Tensor

PROTOCOLS = ("http", "grpc")


class ForeignRequest(Prepared):
    """One request that another client is to send from a slot.

    epoch: of the slot, for as long as the lease lasts. is_over: its reply was taken.
    """

    __slots__ = (
        "_api",
        "_exchange",
        "_inputs",
        "_ready",
        "_sent",
        "epoch",
        "is_over",
        "slot",
    )

    def __init__(
        self, slot: Slot, ready: Prepared, api: TritonApi, exchange: Exchange
    ) -> None:
        # What comes is learned from, but not by a caller whose client raises what did
        # not fit: it would meet the same again.
        unsure = {each.name for each in slot.outputs.values() if is_open(each)}
        wire = ready.wire_outputs | unsure
        # Nobody gives inputs of these bits: no request of our own is this one.
        super().__init__(b"", given=-1, wire_outputs=wire, key=ready.key)
        self.slot = slot
        self.epoch = slot.epoch + 1
        self.is_over = False
        self._ready = ready
        given = ready.given
        self._inputs = [each for each in slot.inputs.values() if each.bit & given]
        self._api = api
        self._exchange = exchange
        # The name of each input, each time that it is put into a request.
        self._sent: list[str] = []

    @classmethod
    def begin(cls, slot: Slot, api: TritonApi, exchange: Exchange) -> ForeignRequest:
        """The server holds the slot from now on; it must be ready to send."""
        ready = slot.prepared
        assert ready is not None
        slot.prepared = foreign = cls(slot, ready, api, exchange)
        # Whatever was read before expires. In this order: a slot that the server holds
        # is always known to be lent.
        slot.epoch = slot.foreign = foreign.epoch
        slot.record[0] = 1
        slot.server_hold = True
        return foreign

    # --- what tritonclient is handed --------------------------------------------------

    def inputs(self) -> list[Any]:
        """As tritonclient's objects, which tell when they are sent."""
        return [self._input(tensor) for tensor in self._inputs]

    def _input(self, tensor: Tensor) -> Any:
        shape = list(tensor.shape or ())
        made = self._api.input(tensor.name, shape, tensor.spec.datatype)
        made.foreign = self
        if tensor.is_shared and tensor.nbytes:
            made.set_shared_memory(
                tensor.registration.name, tensor.nbytes, tensor.offset
            )
        else:
            made.set_data_from_numpy(_content(tensor))
        return made

    def outputs(self) -> list[Any]:
        outputs = []
        for tensor in self.slot.outputs.values():
            made = self._api.output(tensor.name)
            if tensor.name not in self.wire_outputs:
                made.set_shared_memory(
                    tensor.registration.name, tensor.capacity, tensor.offset
                )
            outputs.append(made)
        return outputs

    def check_protocol(self, protocol: str) -> None:
        if protocol != self._api.protocol:
            raise UsageError(
                f"this request was begun with protocol={self._api.protocol!r}, now"
                f" {protocol!r} is asked for.",
                hint="Inputs and outputs of one request are of one protocol.",
            )

    def note_sent(self, name: str) -> None:
        """An input is being put into a request; raises if that must not be sent.

        Noted before it is looked at whether all is over, where `take` does both the
        other way round: one of the two sees the other.
        """
        self._sent.append(name)
        if self.is_over or self.slot.epoch != self.epoch:
            raise LeaseExpired(
                f"input {name!r} was made for one request of one lease, and that is"
                " over: its memory may serve another caller by now.",
                hint="Make new ones with triton_inputs() for each request.",
                tensor=name,
            )

    # --- what tritonclient hands back -------------------------------------------------

    def take(self, reply: object) -> Result:
        """The outputs, checked; the server holds the slot no more, if it is sure."""
        if not isinstance(reply, self._api.result):
            raise self._not_a_reply(reply)
        if not self._sent:
            raise UsageError(
                "the reply belongs to another request: none was sent with the objects"
                " of this lease.",
                hint="Send what triton_inputs() of this very lease gave.",
            )
        answer = self._api.read(reply, self.wire_outputs)
        accepted = self._exchange.check_foreign(self.slot, self, answer)
        self.is_over = True
        # Sent twice, as by a client that tries again, the first one may still run.
        if max(Counter(self._sent).values()) == 1:
            # Outputs may have other shapes now than the replies told of.
            self._ready.forget()
            self.slot.prepared = self._ready
            self._exchange.withdraw(self.slot)
        return Result(self.slot, self.epoch, accepted)

    def _not_a_reply(self, reply: object) -> UsageError:
        return UsageError(
            f"the reply is of type {type(reply).__name__}, not the InferResult of"
            f" tritonclient.{self._api.protocol}.",
            hint="Give what infer() returned: awaited with asyncio, get_result() of an"
            " InferAsyncRequest, the first argument of a callback.",
        )

    def __repr__(self) -> str:
        state = "over" if self.is_over else f"{len(self._sent)} inputs sent"
        return f"<ForeignRequest {self._api.protocol} on {self.slot!r}, {state}>"


def lent_now(slot: Slot) -> ForeignRequest | None:
    """The request that another client may be sending for the lease on this slot."""
    foreign = slot.prepared
    if not isinstance(foreign, ForeignRequest) or foreign.is_over:
        return None
    return foreign if foreign.epoch == slot.epoch and slot.server_hold else None


def _content(tensor: Tensor) -> Array:
    """The array of an input that goes over the wire."""
    if tensor.is_bytes:
        return decode(tensor.root.data[: tensor.nbytes], tensor.shape or ())
    return tensor.array


# --- tritonclient ---------------------------------------------------------------------


class TritonApi(NamedTuple):
    """What one protocol of tritonclient has: its classes, and how a reply is read."""

    protocol: str
    input: Callable[[str, list[int], str], Any]
    output: Callable[[str], Any]
    result: type[Any]
    read: Callable[[Any, frozenset[str]], InferReply]


@functools.cache
def triton_api(protocol: str) -> TritonApi:
    """Imported when first asked for."""
    if protocol not in PROTOCOLS:
        raise UsageError(f"protocol={protocol!r}: give 'http' or 'grpc'.")
    try:
        module = _http() if protocol == "http" else _grpc()
    # What it raises where a protocol was left out when it was installed.
    except (ImportError, RuntimeError) as error:
        raise ExtraMissing(
            f"tritonclient for {protocol} is not installed, or does not load: {error}.",
            hint=f"Install it: pip install 'tritonclient[{protocol}]'.",
            extra=f"tritonclient[{protocol}]",
        ) from error
    return TritonApi(
        protocol,
        _telling(module.InferInput),
        module.InferRequestedOutput,
        module.InferResult,
        read_http if protocol == "http" else read_grpc,
    )


def _http() -> Any:
    import tritonclient.http

    return tritonclient.http


def _grpc() -> Any:
    import tritonclient.grpc

    return tritonclient.grpc


def _telling(base: Any) -> Any:
    """tritonclient's InferInput, which tells its request each time it is sent."""
    if not hasattr(base, "_get_tensor"):
        raise UsageError(
            "this version of tritonclient builds requests in a way that shmlane does"
            " not know: it could not tell when memory is in use.",
            hint="Use a version from 2.20 to 2.73.",
        )

    def get_tensor(self: Any) -> Any:
        self.foreign.note_sent(self.name())
        return base._get_tensor(self)

    return type("InferInput", (base,), {"_get_tensor": get_tensor})


# --- replies --------------------------------------------------------------------------


def read_http(reply: Any, wire: frozenset[str]) -> InferReply:
    response = reply.get_response()
    outputs = []
    for each in response.get("outputs", ()):
        name, datatype = each["name"], each["datatype"]
        # Neither is there for what lies in shared memory.
        came = "data" in each or "binary_data_size" in each.get("parameters", ())
        data = _bytes_of(reply, name, datatype) if came else None
        outputs.append(OutputReply(name, datatype, _sizes(each["shape"]), data))
    return InferReply(
        response.get("id", ""),
        response["model_name"],
        response.get("model_version", ""),
        tuple(outputs),
        response.get("parameters", {}),
    )


def _bytes_of(reply: Any, name: str, datatype: str) -> memoryview:
    """An output that came over the wire, as it came, in memory that can be written."""
    array = reply.as_numpy(name)
    if datatype == BYTES:
        elements = Elements.of(array, name=name)
        data = bytearray(elements.nbytes)
        elements.write_into(memoryview(data))
        return memoryview(data)
    if datatype == "BF16" and array.dtype == np.float32:
        # As older versions give it: the other half of the bits is zero.
        array = (array.view(np.uint32) >> 16).astype(np.uint16)
    return memoryview(bytearray(array.tobytes()))


def read_grpc(reply: Any, wire: frozenset[str]) -> InferReply:
    response = reply.get_response()
    contents = response.raw_output_contents
    return InferReply(
        response.id,
        response.model_name,
        response.model_version,
        tuple(_grpc_outputs(response.outputs, contents, wire)),
        _grpc_parameters(response.parameters),
    )


def _grpc_outputs(
    outputs: Iterable[Any], contents: Any, wire: frozenset[str]
) -> Iterator[OutputReply]:
    for index, each in enumerate(outputs):
        # Empty for what lies in shared memory.
        content = contents[index] if index < len(contents) else b""
        is_there = content or each.name in wire
        data = memoryview(bytearray(content)) if is_there else None
        yield OutputReply(each.name, each.datatype, _sizes(each.shape), data)


def _grpc_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: getattr(each, each.WhichOneof("parameter_choice"))
        for name, each in parameters.items()
    }


def _sizes(shape: Iterable[Any]) -> Shape:
    sizes = tuple(shape)
    if any(type(size) is not int or size < 0 for size in sizes):
        raise ProtocolError(f"an output came with shape {sizes}.")
    return sizes
