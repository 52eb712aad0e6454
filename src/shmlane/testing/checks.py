"""Whether an inference request fits its model, in the words of Triton's core.

Owns the checks of infer_request.cc, in its order: outputs, number of inputs, batch,
then per input name, datatype, shape and bytes. Refuses to run anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from . import codec
from .calls import Call, InputTensor
from .dialect import Dialect
from .http import refused
from .models import FakeModel, FakeTensor

_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch"
    " dimension to be prepended to each input shape. If you want to specify the full"
    " shape including the batch dim in your input dims config, try setting"
    " max_batch_size to zero. See the model configuration docs for more info on"
    " max_batch_size."
)


def check(call: Call, model: FakeModel, dialect: Dialect) -> None:
    """Raises what `refused` makes; `RegionError` where reading would end a Triton."""
    if call.is_raw:
        _deduce_shape(call, model)
    for name in call.outputs:
        if name not in model.outputs:
            raise refused(
                400, f"unexpected inference output '{name}' for model '{model.name}'"
            )
    _check_count(call, model)
    _check_batch(call, model)
    for tensor in call.inputs.values():
        if tensor.name not in model.inputs:
            raise refused(
                400,
                f"unexpected inference input '{tensor.name}' for model '{model.name}'",
            )
        declared = model.inputs[tensor.name]
        _check_datatype(call, model, tensor, declared)
        _check_shape(call, model, tensor, declared)
        if declared.datatype == codec.BYTES:
            _check_elements(call, model, tensor)
        else:
            _check_bytes(call, model, tensor, dialect)


def _check_count(call: Call, model: FakeModel) -> None:
    most, least, got = len(model.inputs), len(model.required), len(call.inputs)
    if least <= got <= most:
        return
    expected = (
        f"expected {most} inputs"
        if least == most
        else f"expected number of inputs between {least} and {most}"
    )
    missing = [name for name in model.required if name not in call.inputs]
    # Triton forgets the bracket when none is missing.
    names = f"[{_quoted(missing)}]" if missing else "]"
    raise refused(
        400,
        f"{call.label}{expected} but got {got} inputs for model '{model.name}'. Got"
        f" input(s) [{_quoted(call.inputs)}], but missing required input(s) {names}."
        " Please provide all required input(s).",
    )


def _check_batch(call: Call, model: FakeModel) -> None:
    if not model.max_batch_size:
        return
    batch = 0
    for name, tensor in call.inputs.items():
        if not tensor.shape:
            raise refused(
                400,
                f"{call.label}input '{name}' has no shape but model requires batch"
                f" dimension for '{model.name}'",
            )
        batch = batch or tensor.shape[0]
        if tensor.shape[0] != batch:
            raise refused(
                400,
                f"{call.label}input '{name}' batch size does not match other inputs for"
                f" '{model.name}'",
            )
    if batch > model.max_batch_size:
        raise refused(
            400,
            f"{call.label}inference request batch-size must be <="
            f" {model.max_batch_size} for '{model.name}'",
        )


def _check_datatype(
    call: Call, model: FakeModel, tensor: InputTensor, declared: FakeTensor
) -> None:
    if tensor.datatype != declared.datatype:
        given = tensor.datatype if codec.is_known(tensor.datatype) else "<invalid>"
        raise refused(
            400,
            f"{call.label}inference input '{tensor.name}' data-type is '{given}', but"
            f" model '{model.name}' expects '{declared.datatype}'",
        )


def _check_shape(
    call: Call, model: FakeModel, tensor: InputTensor, declared: FakeTensor
) -> None:
    expected = model.shape_of(declared)
    fits = len(expected) == len(tensor.shape) and all(
        allowed in (-1, size)
        for size, allowed in zip(tensor.shape, expected, strict=True)
    )
    if not fits:
        raise refused(
            400,
            f"{call.label}unexpected shape for input '{tensor.name}' for model"
            f" '{model.name}'. Expected {_dims(expected)}, got {_dims(tensor.shape)}."
            f" {_BATCH_NOTE if model.max_batch_size else ''}",
        )


def _check_bytes(
    call: Call, model: FakeModel, tensor: InputTensor, dialect: Dialect
) -> None:
    batch, shape = 1, tensor.shape
    if model.max_batch_size:
        # A batch of none is measured as a batch of one, and so refused.
        batch, shape = max(1, shape[0]), shape[1:]
    expected = batch * codec.nbytes(tensor.datatype, shape)
    # Before 2.47 what is too short reaches the backend, and each fails in its own way.
    fits = tensor.nbytes == expected
    if not dialect.demands_exact_inputs:
        fits = tensor.nbytes >= expected
    if not fits:
        raise refused(
            400,
            f"{call.label}input byte size mismatch for input '{tensor.name}' for model"
            f" '{model.name}'. Expected {expected}, got {tensor.nbytes}",
        )


def _check_elements(call: Call, model: FakeModel, tensor: InputTensor) -> None:
    """The buffer of a BYTES input is walked element by element."""
    elements, left, wanted = codec.split_elements(tensor.data())
    expected, got = math.prod(tensor.shape), len(elements)
    whose = f"for inference input '{tensor.name}'"
    if wanted is not None:
        raise refused(
            400,
            f"incomplete string data {whose}, expecting string of length {wanted} but"
            f" only {left} bytes available",
            plain=True,
        )
    if left:
        raise refused(
            400,
            f"{call.label}incomplete string length indicator {whose} for model"
            f" '{model.name}', expecting 4 bytes but only {left} bytes available."
            " Please make sure the string length indicator is in one buffer.",
        )
    if got > expected:
        raise refused(
            400,
            f"{call.label}unexpected number of string elements {expected + 1} {whose}"
            f" for model '{model.name}', expecting {expected}",
        )
    if got < expected:
        raise refused(
            400,
            f"{call.label}expected {expected} string elements {whose} for model"
            f" '{model.name}', got {got}",
        )


def _deduce_shape(call: Call, model: FakeModel) -> None:
    """Give the input of a request without JSON the one shape that it can have."""
    name, declared = next(iter(model.inputs.items()))
    if len(model.inputs) != 1:
        raise refused(
            400,
            f"{call.label}Raw request must only have 1 input (found 1) to be deduced"
            f" but got {len(model.inputs)} inputs in '{model.name}' model"
            " configuration",
        )
    if declared.datatype == codec.BYTES:
        raise refused(
            400,
            f"{call.label}For BYTE datatype raw input '{name}', the model must have"
            " input shape [1]",
        )
    shape = list(declared.dims)
    if shape.count(-1) > 1:
        raise refused(
            400,
            f"{call.label}The shape of the raw input '{name}' can not be deduced"
            " because there are more than one variable-sized dimension",
        )
    tensor = call.inputs[name]
    if -1 in shape:
        known = codec.nbytes(declared.datatype, [size for size in shape if size != -1])
        shape[shape.index(-1)] = tensor.nbytes // known if known else 0
    tensor.shape = (1, *shape) if model.max_batch_size else tuple(shape)


def _quoted(names: Iterable[str]) -> str:
    return ",".join(f"'{name}'" for name in names)


def _dims(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"
