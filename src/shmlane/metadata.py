"""What a model says about its tensors: names, datatypes, shapes.

Owns the checks of what callers ask for against it, and the reading of the server's
answers. Refuses to take a server's word for the form of what it says. Sizes are bytes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .datatypes import BYTES, DTYPES
from .errors import ProtocolError, TensorMismatch, UnknownTensor, UsageError

T = TypeVar("T")
Shape = tuple[int, ...]
Array = npt.NDArray[Any]

# Of 8 bytes each, they are as many as an address can tell apart.
MOST_ELEMENTS = 1 << 59

# Characters of a malformed answer that an error repeats.
_SHOWN = 80

_JSON_KINDS: Mapping[type, str] = MappingProxyType(
    {
        dict: "an object",
        list: "a list",
        str: "a string",
        int: "a whole number",
        bool: "true or false",
    }
)


def expect(kind: type[T], value: object, what: str) -> T:
    """`value`, part of a server's JSON, if it is of that kind; else `ProtocolError`.

    kind: dict, list, str, int or bool. what: names the part in the message.
    """
    # Exactly: to Python, true is a number.
    if type(value) is not kind:
        raise malformed(f"{what} is {_brief(value)}, not {_JSON_KINDS[kind]}.")
    return value


def malformed(message: str) -> ProtocolError:
    return ProtocolError(message, hint="Is this the HTTP address of a tritonserver?")


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output as the model declares it.

    shape: full shape, batch dimension included; -1 where any size is allowed.
    max_batch: largest first dimension, or 0 when the model does not batch.
    """

    name: str
    datatype: str
    shape: Shape
    optional: bool = False
    max_batch: int = 0

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy type, object for BYTES; `UsageError` for an unknown datatype."""
        if self.is_bytes:
            return np.dtype(object)
        try:
            return DTYPES[self.datatype]
        except KeyError:
            raise UsageError(
                f"tensor {self.name!r} has datatype {self.datatype}, which shmlane"
                " does not know.",
                hint=f"Datatypes it moves: {', '.join([*DTYPES, BYTES])}.",
                tensor=self.name,
                datatype=self.datatype,
            ) from None

    @property
    def is_bytes(self) -> bool:
        """Whether the elements are strings of bytes, each as long as it likes."""
        return self.datatype == BYTES

    @property
    def is_fixed(self) -> bool:
        """Whether the model allows one size only."""
        return -1 not in self.shape and not self.is_bytes

    @property
    def is_fixed_but_for_batch(self) -> bool:
        """Whether only the number of items in a batch is open."""
        is_open = -1 in self.shape[1:] or self.is_bytes
        return self.max_batch > 0 and not is_open

    @property
    def is_sized(self) -> bool:
        """Whether the model and the batch size tell how many bytes it has."""
        return self.is_fixed or self.is_fixed_but_for_batch

    def check_shape(self, shape: Iterable[int]) -> Shape:
        """`shape` as a tuple of ints; `TensorMismatch` if the model forbids it."""
        try:
            # Not int(): half an element is a mistake, and so is a string of digits.
            given = tuple(map(operator.index, shape))
        except TypeError:
            raise self._mismatch(shape) from None
        if not self._allows(given):
            raise self._mismatch(given)
        # Empty tensors too: NumPy multiplies the other sizes.
        if math.prod(max(size, 1) for size in given) > MOST_ELEMENTS:
            raise TensorMismatch(
                f"tensor {self.name!r} cannot have shape {given}: that is beyond any"
                " memory.",
                tensor=self.name,
                given=given,
            )
        if self.max_batch and given[0] > self.max_batch:
            raise TensorMismatch(
                f"tensor {self.name!r} cannot have shape {given}: the model takes"
                f" batches of at most {self.max_batch}.",
                tensor=self.name,
                given=given,
                max_batch=self.max_batch,
            )
        return given

    def _allows(self, given: Shape) -> bool:
        return len(given) == len(self.shape) and all(
            size >= 0 and allowed in (-1, size)
            for size, allowed in zip(given, self.shape, strict=True)
        )

    def _mismatch(self, given: object) -> TensorMismatch:
        return TensorMismatch(
            f"tensor {self.name!r} cannot have shape {given!r}: the model allows"
            f" {self.shape}{' (-1 is any size)' if not self.is_fixed else ''}.",
            hint=self._likely_mistake(given),
            tensor=self.name,
            given=given,
            allowed=self.shape,
        )

    def _likely_mistake(self, given: object) -> str:
        if not isinstance(given, tuple) or any(type(size) is not int for size in given):
            return "Give one whole number per dimension."
        if self.max_batch and self._allows((1, *given)):
            return "The batch dimension is missing: array[None] adds it."
        if len(given) == 4 and self._allows(tuple(given[i] for i in (0, 3, 1, 2))):
            return (
                "It looks channels-last: array.transpose(0, 3, 1, 2) is channels-first."
            )
        if len(given) != len(self.shape):
            wanted = len(self.shape)
            noun = "dimension" if len(given) == 1 else "dimensions"
            return f"It has {len(given)} {noun}, the model wants {wanted}."
        return ""

    def nbytes(self, shape: Shape) -> int:
        """Bytes of a tensor of that shape; not for BYTES, which no shape tells."""
        return math.prod(shape) * self.dtype.itemsize

    def __repr__(self) -> str:
        optional = " optional" if self.optional else ""
        return f"<{self.name} {self.datatype} {list(self.shape)}{optional}>"


@dataclass(frozen=True, slots=True, repr=False)
class ModelMetadata:
    """What the server says about the model: names, tensors and its own version."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    max_batch_size: int
    server_version: str
    decoupled: bool = False

    @classmethod
    def from_json(
        cls,
        metadata: object,
        config: object,
        *,
        server_version: str,
    ) -> ModelMetadata:
        """Join the answers of the metadata and the configuration endpoint.

        The metadata has shapes with the batch dimension; only the configuration knows
        max_batch_size and which inputs are optional (model_config.proto). Raises
        `ProtocolError` for answers that have another form than Triton's.
        """
        about = expect(dict, metadata, "the model's metadata")
        more = _Config.from_json(config)
        return cls(
            name=expect(str, about.get("name"), "the name in the model's metadata"),
            versions=tuple(
                expect(str, version, "a version in the model's metadata")
                for version in expect(
                    list, about.get("versions", []), "versions in the model's metadata"
                )
            ),
            platform=expect(
                str, about.get("platform", ""), "the platform in the model's metadata"
            ),
            inputs=_specs(about.get("inputs"), "input", more),
            outputs=_specs(about.get("outputs"), "output", more),
            max_batch_size=more.max_batch,
            server_version=server_version,
            decoupled=more.decoupled,
        )

    def to_json(self) -> dict[str, Any]:
        """What `from_json` makes the same of, by its arguments."""
        return {
            "metadata": {
                "name": self.name,
                "versions": list(self.versions),
                "platform": self.platform,
                "inputs": [_spec_json(spec) for spec in self.inputs.values()],
                "outputs": [_spec_json(spec) for spec in self.outputs.values()],
            },
            "config": {
                "max_batch_size": self.max_batch_size,
                "input": [
                    {"name": spec.name, "optional": spec.optional}
                    for spec in self.inputs.values()
                ],
            },
            "server_version": self.server_version,
        }

    def __repr__(self) -> str:
        tensors = (
            f"{kind}: {', '.join(map(repr, specs.values()))}"
            for kind, specs in (("inputs", self.inputs), ("outputs", self.outputs))
        )
        versions = ", ".join(self.versions) or "none"
        batches = f"batches of up to {self.max_batch_size}"
        return (
            f"<ModelMetadata {self.name!r} version {versions} on {self.platform},"
            f" {batches if self.max_batch_size else 'no batching'};"
            f" {'; '.join(tensors)}>"
        )


@dataclass(frozen=True, slots=True)
class _Config:
    """What only a model's configuration says."""

    max_batch: int
    optional: frozenset[str]
    decoupled: bool

    @classmethod
    def from_json(cls, config: object) -> _Config:
        where = "in the model's configuration"
        about = expect(dict, config, "the model's configuration")
        max_batch = expect(
            int, about.get("max_batch_size", 0), f"max_batch_size {where}"
        )
        if max_batch < 0:
            raise malformed(f"max_batch_size {where} is {max_batch}.")
        optional = set()
        for each in expect(list, about.get("input", []), f"input {where}"):
            tensor = expect(dict, each, f"an input {where}")
            name = expect(str, tensor.get("name"), f"the name of an input {where}")
            told = tensor.get("optional", False)
            if expect(bool, told, f"optional of input {name!r} {where}"):
                optional.add(name)
        policy = about.get("model_transaction_policy", {})
        policy = expect(dict, policy, f"model_transaction_policy {where}")
        decoupled = expect(bool, policy.get("decoupled", False), f"decoupled {where}")
        return cls(max_batch, frozenset(optional), decoupled)


def _specs(tensors: object, kind: str, config: _Config) -> Mapping[str, TensorSpec]:
    where = "in the model's metadata"
    specs = {}
    for each in expect(list, tensors, f"{kind}s {where}"):
        tensor = expect(dict, each, f"an {kind} {where}")
        name = expect(str, tensor.get("name"), f"the name of an {kind} {where}")
        which = f"of {kind} {name!r} {where}"
        if name in specs:
            raise malformed(f"{kind} {name!r} is there twice {where}.")
        specs[name] = TensorSpec(
            name,
            expect(str, tensor.get("datatype"), f"the datatype {which}"),
            _shape(tensor.get("shape"), f"the shape {which}"),
            name in config.optional,
            config.max_batch,
        )
    return MappingProxyType(specs)


def _spec_json(spec: TensorSpec) -> dict[str, Any]:
    shape = list(spec.shape)
    return {"name": spec.name, "datatype": spec.datatype, "shape": shape}


def _shape(sizes: object, what: str) -> Shape:
    shape = tuple(
        expect(int, size, f"a size in {what}") for size in expect(list, sizes, what)
    )
    if any(size < -1 for size in shape):
        raise malformed(f"{what} is {_brief(sizes)}; sizes are -1 (any) or more.")
    return shape


def lookup(specs: Mapping[str, TensorSpec], name: str, kind: str) -> TensorSpec:
    """The spec of that name; `UnknownTensor` with the names that exist."""
    try:
        return specs[name]
    except KeyError:
        raise unknown_tensor(specs, name, kind) from None


def unknown_tensor(known: Iterable[str], name: object, kind: str) -> UnknownTensor:
    names = ", ".join(repr(known_name) for known_name in known) or "none"
    return UnknownTensor(
        f"there is no {kind} {name!r}; this model has: {names}.", tensor=name
    )
