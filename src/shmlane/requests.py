"""The requests of a slot: what is sent, and where each output is to lie.

Owns the choice between shared memory and the wire for each tensor, and what was learned
about outputs whose size the model leaves open. Refuses to judge replies (`exchange`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

from .errors import TensorMismatch
from .options import RequestOptions
from .prepared import Prepared, id_of
from .replies import InferReply
from .sizes import Key, OutputSizes
from .slots import Channel, Slot
from .tensors import Tensor
from .wire import HttpRequests, TensorRef

# With room for the JSON in front of it.
MAX_WIRE_BYTES = (1 << 31) - (1 << 20)
# Of callers, that are remembered of one connection.
_MOST_OWN_IDS = 4096


class RequestBuilding:
    """Prepares the requests of one session.

    rerun: whether the model may run again for one call, because an output did not fit.
    """

    def __init__(self, requests: HttpRequests, *, rerun: bool) -> None:
        self.sizes = OutputSizes()
        self._requests = requests
        self._rerun = rerun
        self._lock = threading.Lock()
        # Requests that ask for outputs by what is expected of their size.
        self._hopeful: weakref.WeakSet[Prepared] = weakref.WeakSet()

    def prepare(
        self, slot: Slot, given: int, options: RequestOptions | None = None
    ) -> None:
        """Build the request for the current shapes; `given` has the inputs' bits."""
        if options is not None:
            options.check_outputs(
                {name: each.spec for name, each in slot.outputs.items()}
            )
        sent = [tensor for tensor in slot.inputs.values() if tensor.bit & given]
        if options is not None and options.classification:
            _check_ranked(sent)
        inputs = [_input_reference(tensor) for tensor in sent]
        key = _key(slot, given)
        batch = _batch(slot, given)
        outputs = [
            self._output_reference(tensor, batch, key, options)
            for tensor in slot.outputs.values()
        ]
        _check_wire(inputs)
        ours = "" if options is not None and options.id else id_of(slot.series, 0)
        slot.prepared = Prepared(
            self._build(ours, inputs, outputs, options),
            given=given,
            our_id=ours,
            options=options,
            wire_inputs=[
                tensor
                for tensor, each in zip(sent, inputs, strict=True)
                if each.nbytes and not each.region
            ],
            wire_outputs=frozenset(
                output.name for output in outputs if not output.region
            ),
            key=key,
        )
        if key is not None:
            with self._lock:
                self._hopeful.add(slot.prepared)

    def _build(
        self,
        our_id: str,
        inputs: Sequence[TensorRef],
        outputs: Sequence[TensorRef],
        options: RequestOptions | None,
    ) -> bytes:
        if options is None:
            return self._requests.infer(our_id, inputs, outputs)
        parameters = options.json_parameters()
        return self._requests.infer(
            our_id or options.id,
            inputs,
            outputs,
            parameters=f"{parameters}," if parameters else "",
            headers=options.headers,
        )

    def _output_reference(
        self,
        tensor: Tensor,
        batch: int,
        key: Key | None,
        options: RequestOptions | None,
    ) -> TensorRef:
        """Where an output is to lie; without a region where it may not fit."""
        nbytes = self._output_nbytes(tensor, batch, key)
        classes = classes_of(options, tensor.name)
        fits = nbytes is not None and 0 < nbytes <= tensor.capacity and not classes
        # A step of a sequence that did not fit could not be had again.
        if options is not None and options.has_sequence and is_open(tensor):
            fits = False
        return TensorRef(
            tensor.name,
            tensor.spec.datatype,
            (),
            tensor.registration.name if fits else "",
            tensor.offset,
            tensor.capacity,
            classes,
        )

    def _output_nbytes(self, tensor: Tensor, batch: int, key: Key | None) -> int | None:
        """The most bytes of this output in a request of that batch size and key."""
        spec = tensor.spec
        if spec.is_fixed:
            return spec.nbytes(spec.shape)
        if spec.is_fixed_but_for_batch:
            return spec.nbytes((batch, *spec.shape[1:]))
        # What the caller declared, or what did not fit that; then what was learned.
        if tensor.plan.capacity:
            seen = self.sizes.largest(tensor.name)
            return max(tensor.plan.capacity, tensor.capacity, seen)
        if key is None or (spec.is_bytes and not self._rerun):
            return None
        return self.sizes.expected(tensor.name, key, rerun=self._rerun)

    def outgrown(
        self, slot: Slot, given: int, options: RequestOptions | None = None
    ) -> list[tuple[Tensor, int]]:
        """Outputs whose block is too small for such a request, and what they need."""
        if not slot.is_shared:
            return []
        batch, key = _batch(slot, given), _key(slot, given)
        sizes = [
            (tensor, self._output_nbytes(tensor, batch, key))
            for tensor in slot.outputs.values()
            if not classes_of(options, tensor.name)
        ]
        return [
            (tensor, nbytes)
            for tensor, nbytes in sizes
            if nbytes is not None and nbytes > tensor.capacity
        ]

    def learn(self, slot: Slot, prepared: Prepared, answer: InferReply) -> None:
        """Remember the sizes of outputs that the model leaves open."""
        if prepared.key is None:
            return
        for output in answer.outputs:
            tensor = slot.outputs.get(output.name)
            if tensor is None or not is_open(tensor):
                continue
            if classes_of(prepared.options, output.name):
                continue
            if output.data is not None:
                self.note_size(prepared, output.name, len(output.data))
            elif not tensor.is_bytes:
                self.note_size(prepared, output.name, tensor.nbytes)

    def note_size(self, prepared: Prepared, output: str, nbytes: int) -> None:
        """So large was an output, whether it came or did not fit.

        What other slots have prepared by what was expected until now is of no use.
        """
        key = prepared.key
        # Without a key, what was declared is too small, whatever the inputs.
        if not self.sizes.learn(output, key or (), nbytes):
            return
        with self._lock:
            hopeful = list(self._hopeful)
        for other in hopeful:
            other.spoil()

    def __repr__(self) -> str:
        return f"<RequestBuilding {self.sizes!r}>"


def _check_ranked(sent: Sequence[Tensor]) -> None:
    """A server that is to rank an output without elements dies of it (seen in 2.51)."""
    for tensor in sent:
        if not tensor.nbytes:
            raise TensorMismatch(
                f"RequestOptions(classification=): input {tensor.name!r} has no"
                " elements, so that an output may have none to be ranked.",
                hint="Leave out the classification, or the call.",
                tensor=tensor.name,
            )


def _check_wire(inputs: Sequence[TensorRef]) -> None:
    """Triton's HTTP frontend reads the length of a body as a signed 32 bit number."""
    sent = {each.name: each.nbytes for each in inputs if not each.region}
    if sum(sent.values()) > MAX_WIRE_BYTES:
        largest = max(sent, key=sent.__getitem__)
        raise TensorMismatch(
            f"the inputs over the wire have {sum(sent.values())} bytes together, the"
            f" largest is {largest!r} with {sent[largest]}; Triton reads at most"
            f" {MAX_WIRE_BYTES} in one request.",
            hint="Use shared memory, which has no such limit, or smaller batches.",
            tensor=largest,
            nbytes=sum(sent.values()),
            limit=MAX_WIRE_BYTES,
        )


def repeats_id(channel: Channel, options: RequestOptions | None) -> bool:
    """Whether a late duplicate of an earlier reply could pass for the next one's.

    Ours are sent once. A caller's own is sent as it is, so that it must not meet its
    like on one connection.
    """
    own_ids = channel.own_ids
    if options is None or not options.id:
        return False
    return options.id in own_ids or len(own_ids) >= _MOST_OWN_IDS


def can_grow(slot: Slot, output: str) -> bool:
    """Whether another request may have more room for this output."""
    tensor = slot.outputs.get(output)
    return tensor is not None and not tensor.spec.is_sized


def classes_of(options: RequestOptions | None, output: str) -> int:
    """How many classes are asked for in the place of this output."""
    return 0 if options is None else options.classification.get(output, 0)


def _batch(slot: Slot, given: int) -> int:
    """Requests of one batching model have one first dimension in common."""
    for tensor in slot.inputs.values():
        if tensor.bit & given and tensor.shape:
            return tensor.shape[0]
    return 1


def is_open(tensor: Tensor) -> bool:
    """Whether nothing but replies tells the size of this output."""
    return not tensor.spec.is_sized and not tensor.plan.capacity


def _key(slot: Slot, given: int) -> Key | None:
    """The shapes of the inputs, if sizes of outputs are to be learned by them."""
    if not any(map(is_open, slot.outputs.values())):
        return None
    return tuple(
        tensor.shape if tensor.bit & given else None for tensor in slot.inputs.values()
    )


def _input_reference(tensor: Tensor) -> TensorRef:
    """Where an input lies; without a region if it goes over the wire, or is empty."""
    is_there = tensor.nbytes > 0 and tensor.lent is None
    return TensorRef(
        tensor.name,
        tensor.spec.datatype,
        tensor.shape or (),
        tensor.registration.name if is_there else "",
        tensor.offset,
        tensor.nbytes,
    )
