"""Models that are Python functions, with the metadata and configuration of real ones.

Owns what a model declares and what Triton says about it. Refuses to check requests
(`checks`) and to wait.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ..errors import UsageError
from ..metadata import Array
from .codec import BYTES, is_known

_EXAMPLE = "as in {'IMAGE': ('FP32', (3, -1, -1))}"

Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]


class FakeTensor(NamedTuple):
    """One input or output, as in a `config.pbtxt`.

    dims: without the batch dimension of a model that batches; -1 is any size.
    """

    datatype: str
    dims: tuple[int, ...]
    optional: bool = False


class FakeModel:
    """A model whose outputs a function makes from its inputs.

    inputs, outputs: by name, each a `FakeTensor` or its arguments, as in
        `{"IMAGE": ("FP32", (3, -1, -1))}`. Datatypes are those of KServe: FP32, UINT8,
        BYTES and so on.
    run: called with read-only arrays by name, the batch dimension included, that lie
        where the client put them; returns arrays by name. BYTES are arrays of `bytes`
        objects. A `ValueError` it raises is answered with status 400, any other
        exception with 500, and the exception's text; so is an output of another
        datatype or shape than declared, and one that was asked for and not returned.
    max_batch_size: 0 for a model that does not batch.
    decoupled: Triton's HTTP frontend refuses inferences then.
    obeys_delay_ms: the request parameter `delay_ms` makes the model wait, as the demo
        models do.
    parameters: what the model attaches to each response.

    `is_ready` may be set to False and back: the model loads until then.
    """

    def __init__(
        self,
        name: str,
        *,
        inputs: Mapping[str, FakeTensor | tuple[Any, ...]],
        outputs: Mapping[str, FakeTensor | tuple[Any, ...]],
        run: Run,
        max_batch_size: int = 0,
        versions: Iterable[str] = ("1",),
        decoupled: bool = False,
        obeys_delay_ms: bool = False,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = _checked_name(name)
        self.inputs = _tensors(name, "inputs", inputs)
        self.outputs = _tensors(name, "outputs", outputs)
        self.run = run
        self.max_batch_size = _checked_batch(name, max_batch_size)
        self.versions = _checked_versions(name, versions)
        self.decoupled = decoupled
        self.obeys_delay_ms = obeys_delay_ms
        self.parameters = dict(parameters or {})
        self.is_ready = True
        if not self.inputs:
            raise _refusal(name, "inputs", inputs, f"one input or more, {_EXAMPLE}")
        if not callable(run):
            wanted = "a function that takes and returns arrays by name"
            raise _refusal(name, "run", run, wanted)

    @property
    def required(self) -> list[str]:
        """Names of the inputs that a request must have."""
        return [name for name, tensor in self.inputs.items() if not tensor.optional]

    def shape_of(self, tensor: FakeTensor) -> list[int]:
        """The full shape, with -1 for the batch."""
        return [-1, *tensor.dims] if self.max_batch_size else list(tensor.dims)

    def metadata(self) -> dict[str, Any]:
        """What `GET /v2/models/NAME` answers."""

        def described(tensors: Mapping[str, FakeTensor]) -> list[dict[str, Any]]:
            return [
                {
                    "name": name,
                    "datatype": tensor.datatype,
                    "shape": self.shape_of(tensor),
                }
                for name, tensor in tensors.items()
            ]

        return {
            "name": self.name,
            "versions": list(self.versions),
            "platform": "scripted",
            "inputs": described(self.inputs),
            "outputs": described(self.outputs),
        }

    def config(self) -> dict[str, Any]:
        """What `GET /v2/models/NAME/config` answers, as far as clients read it."""
        config = {
            "name": self.name,
            "platform": "",
            "backend": "scripted",
            "version_policy": {"latest": {"num_versions": len(self.versions)}},
            "max_batch_size": self.max_batch_size,
            "input": [
                {**_configured(name, tensor), "optional": tensor.optional}
                for name, tensor in self.inputs.items()
            ],
            "output": [_configured(*each) for each in self.outputs.items()],
            "instance_group": [{"name": self.name, "kind": "KIND_CPU", "count": 1}],
            "parameters": {},
        }
        if self.decoupled:
            config["model_transaction_policy"] = {"decoupled": True}
        return config

    def __repr__(self) -> str:
        state = "ready" if self.is_ready else "not ready"
        return f"<FakeModel {self.name!r} {state}>"


def _checked_name(given: object) -> str:
    if not isinstance(given, str) or not given:
        raise _refusal(given, "name", given, "text that is not empty")
    return given


def _checked_batch(model: str, given: object) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < 0:
        wanted = "a whole number, 0 for a model that does not batch"
        raise _refusal(model, "max_batch_size", given, wanted)
    return given


def _tensors(model: str, which: str, given: object) -> dict[str, FakeTensor]:
    if not isinstance(given, Mapping) or not all(
        isinstance(each, str) for each in given
    ):
        raise _refusal(model, which, given, f"tensors by name, {_EXAMPLE}")
    tensors = {name: _tensor(model, which, name, each) for name, each in given.items()}
    for name, (datatype, dims, _) in tensors.items():
        if not is_known(datatype) or any(size < -1 for size in dims):
            raise UsageError(
                f"tensor {name!r} of fake model {model!r} cannot be {datatype}"
                f" {list(dims)}.",
                hint="Datatypes are named as in KServe (FP32, UINT8, BYTES, ...), sizes"
                " are numbers, or -1 for any size.",
                tensor=name,
            )
    return tensors


def _tensor(model: str, which: str, name: str, given: object) -> FakeTensor:
    """Datatype and sizes are not known yet to be any of Triton's."""
    try:
        if not isinstance(given, tuple | list):
            raise TypeError
        tensor = FakeTensor(*given)
        if not isinstance(tensor.datatype, str):
            raise TypeError
        return tensor._replace(dims=tuple(map(operator.index, tensor.dims)))
    except TypeError:
        wanted = f"datatype and sizes, {_EXAMPLE}"
        raise _refusal(model, which, {name: given}, wanted) from None


def _checked_versions(model: str, given: object) -> tuple[str, ...]:
    versions = () if isinstance(given, str) else given
    wanted = "numbers as text, one or more, as in ('1', '2')"
    if not isinstance(versions, Iterable):
        raise _refusal(model, "versions", given, wanted)
    kept = tuple(versions)
    if not kept or not all(
        isinstance(each, str) and each.isascii() and each.isdigit() for each in kept
    ):
        raise _refusal(model, "versions", given, wanted)
    return tuple(sorted(kept, key=int))


def _refusal(model: object, name: str, value: object, wanted: str) -> UsageError:
    return UsageError(
        f"fake model {model!r}: {name}={reprlib.repr(value)}: give {wanted}.",
        argument=name,
    )


def _configured(name: str, tensor: FakeTensor) -> dict[str, Any]:
    kind = "STRING" if tensor.datatype == BYTES else tensor.datatype
    return {"name": name, "data_type": f"TYPE_{kind}", "dims": list(tensor.dims)}


# --- the demo models ------------------------------------------------------------------


def identity_model(name: str = "identity") -> FakeModel:
    """Like the demo model: OUTPUT__0 is INPUT__0 (FP32, four dimensions)."""
    return _echo_model(name, lambda array: array, (-1, -1, -1, -1))


def sink_model(name: str = "sink") -> FakeModel:
    """Like the demo model: OUTPUT__0 is the last element of INPUT__0."""
    return _echo_model(name, _last, (1,))


def _echo_model(
    name: str, answer: Callable[[Array], Array], dims: tuple[int, ...]
) -> FakeModel:
    return FakeModel(
        name,
        inputs={"INPUT__0": ("FP32", (-1, -1, -1, -1))},
        outputs={"OUTPUT__0": ("FP32", dims)},
        run=lambda inputs: {"OUTPUT__0": answer(inputs["INPUT__0"])},
        obeys_delay_ms=True,
    )


def _last(array: Array) -> Array:
    if not array.size:
        raise ValueError("sink needs at least one element of a fixed-size type")
    return array.reshape(-1)[-1:]
