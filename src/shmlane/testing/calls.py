"""An inference request as the HTTP frontend reads it (Triton's http_server.cc).

Owns the JSON, the binary data behind it and the borrowing of shared memory. Refuses to
know whether the request fits the model's declaration (`checks`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..metadata import Shape
from ..regions import Bytes
from . import json_fields as fields
from .codec import from_json
from .dialect import Dialect
from .http import Request, refused
from .memory import Block, RegionTable
from .models import FakeModel

_LENGTH_HEADER = "Inference-Header-Content-Length"
_ATOI = re.compile(r"\s*([+-]?\d+)")


@dataclass(slots=True)
class InputTensor:
    """One input: what the request says it is, and where its bytes are."""

    name: str
    datatype: str
    shape: Shape
    content: Bytes | Block

    @property
    def nbytes(self) -> int:
        content = self.content
        return content.nbytes if isinstance(content, Block) else content.size

    def data(self) -> Bytes:
        """The bytes in place; `RegionError` where a Triton would die."""
        content = self.content
        return (
            content if isinstance(content, np.ndarray) else content.touch(self.nbytes)
        )


class OutputWish(NamedTuple):
    """How one output is to come: into a block, as binary data or as JSON.

    classes: so many of the best classes are wanted in its place; 0 for itself.
    """

    block: Block | None = None
    binary: bool = False
    classes: int = 0


@dataclass(slots=True)
class Call:
    """One inference request. `outputs` is empty when all are wanted."""

    request_id: str = ""
    inputs: dict[str, InputTensor] = field(default_factory=dict)
    outputs: dict[str, OutputWish] = field(default_factory=dict)
    prefers_binary: bool = False
    delay_ms: int = 0
    is_raw: bool = False
    blocks: list[Block] = field(default_factory=list)

    @property
    def label(self) -> str:
        """How errors of Triton's core begin."""
        return f"[request id: {self.request_id or '<id_unknown>'}] "

    def wish(self, output: str) -> OutputWish | None:
        """How `output` is wanted, None if it is not."""
        if self.outputs:
            return self.outputs.get(output)
        return OutputWish(binary=self.prefers_binary)


class CallReader:
    """Reads one request. The blocks it borrowed are in `call`, also after an error."""

    def __init__(
        self, request: Request, model: FakeModel, regions: RegionTable, dialect: Dialect
    ) -> None:
        self.call = Call()
        self._request = request
        self._model = model
        self._regions = regions
        self._json_bytes = _json_length(request, dialect)
        self._rest = memoryview(request.body)[self._json_bytes :]

    def read(self) -> None:
        """Fill `call`; raises what `refused` makes."""
        call = self.call
        if self._json_bytes == 0:
            self._read_raw()
            return
        document = fields.parse(self._request.body[: self._json_bytes])
        if isinstance(document, Mapping) and "id" in document:
            call.request_id = fields.string(document["id"], "id")
        self._read_parameters(_parameters(document))
        for item in fields.array(fields.member(document, "inputs"), "inputs"):
            self._read_input(item)
        if self._rest:
            raise refused(
                400,
                f"unexpected additional input data for model '{self._model.name}'",
            )
        for item in fields.array(document.get("outputs", []), "outputs"):
            self._read_output(item)

    def _read_raw(self) -> None:
        """A body without JSON is the data of the model's one input."""
        name, tensor = next(iter(self._model.inputs.items()))
        content = np.frombuffer(self._request.body, np.uint8)
        self.call.inputs[name] = InputTensor(name, tensor.datatype, (), content)
        self.call.is_raw = self.call.prefers_binary = True

    def _read_parameters(self, parameters: Mapping[str, Any]) -> None:
        for name, value in parameters.items():
            if name == "binary_data_output":
                self.call.prefers_binary = fields.boolean(value, name)
            elif name.startswith("triton_"):
                raise refused(
                    400,
                    "parameter keys starting with 'triton_' are reserved for Triton"
                    " usage and should not be specified.",
                )
            elif not isinstance(value, bool | int | float | str):
                raise refused(
                    400,
                    f"parameter '{name}' has invalid type. It should be either 'int',"
                    " 'bool', or 'string'.",
                )
        delay = parameters.get("delay_ms", 0)
        if self._model.obeys_delay_ms and fields.is_integer(delay):
            self.call.delay_ms = delay

    # --- inputs -----------------------------------------------------------------------

    def _read_input(self, item: Any) -> None:
        source = _source(item)
        name = fields.string(fields.member(item, "name"), "name")
        datatype = fields.string(fields.member(item, "datatype"), "datatype")
        sizes = fields.array(fields.member(item, "shape"), "shape")
        shape = tuple(fields.unsigned(size, "shape") for size in sizes)
        if name in self.call.inputs:
            raise refused(
                400, f"{self.call.label}input '{name}' already exists in request"
            )
        content: Bytes | Block
        if source == "data":
            content = from_json(item["data"], name, datatype, shape)
        elif source == "binary_data_size":
            size = fields.unsigned(_parameters(item)[source], source)
            content = self._take(name, size)
        else:
            content = self._borrow(_parameters(item))
        self.call.inputs[name] = InputTensor(name, datatype, shape, content)

    def _take(self, name: str, size: int) -> Bytes:
        """The next bytes of the binary part."""
        if (missing := size - len(self._rest)) > 0:
            raise refused(
                400,
                f"unexpected size for input '{name}', expecting {missing} additional"
                f" bytes for model '{self._model.name}'",
            )
        taken, self._rest = self._rest[:size], self._rest[size:]
        return np.frombuffer(taken, np.uint8)

    def _borrow(self, parameters: Mapping[str, Any]) -> Block:
        """Shared memory; a missing size counts as 0."""

        def number(name: str) -> int:
            return fields.unsigned(parameters.get(name, 0), name)

        region = fields.string(
            parameters["shared_memory_region"], "shared_memory_region"
        )
        block = self._regions.borrow(
            region, number("shared_memory_offset"), number("shared_memory_byte_size")
        )
        self.call.blocks.append(block)
        return block

    # --- outputs ----------------------------------------------------------------------

    def _read_output(self, item: Any) -> None:
        name = fields.string(fields.member(item, "name"), "name")
        parameters = _parameters(item)
        binary = fields.boolean(parameters.get("binary_data", False), "binary_data")
        if "shared_memory_region" in parameters:
            for other in ("classification", "binary_data"):
                if parameters.get(other, False):
                    raise refused(
                        400,
                        f"Output can't set both 'shared_memory_region' and '{other}'",
                    )
            wish = OutputWish(self._borrow(parameters))
        else:
            binary = binary if "binary_data" in parameters else self.call.prefers_binary
            classes = fields.unsigned(
                parameters.get("classification", 0), "classification"
            )
            wish = OutputWish(binary=binary, classes=classes)
        # Of an output that is named twice the first entry counts.
        self.call.outputs.setdefault(name, wish)


def _json_length(request: Request, dialect: Dialect) -> int:
    """Bytes of JSON at the start of the body; 0 means that there is none."""
    whole = len(request.body)
    text = request.headers.get(_LENGTH_HEADER.lower())
    if text is None:
        return whole
    match = _ATOI.match(text)
    if match is None and dialect.parses_lengths:
        raise refused(400, f"Unable to parse {_LENGTH_HEADER}, got: {text}", plain=True)
    length = int(match[1]) if match else 0
    if not 0 <= length <= whole:
        raise refused(
            400,
            f"inference header size should be in range (0, {whole}), got: {length}",
            plain=True,
        )
    return length


def _parameters(item: Any) -> Mapping[str, Any]:
    found = item.get("parameters", {}) if isinstance(item, Mapping) else {}
    return found if isinstance(found, Mapping) else {}


def _source(item: Any) -> str:
    """The one field that says where an input's data is."""
    places = {
        "data": item,
        "binary_data_size": _parameters(item),
        "shared_memory_region": _parameters(item),
    }
    given = [
        field
        for field, place in places.items()
        if isinstance(place, Mapping) and field in place
    ]
    if len(given) == 1:
        return given[0]
    names = " ".join(f"'{each}'" for each in given)
    raise refused(
        400,
        "Input must set only one of the following fields: 'data', 'binary_data_size' in"
        " 'parameters', 'shared_memory_region' in 'parameters'. But"
        f" {f'set {names}' if given else 'no field is set'}",
    )
