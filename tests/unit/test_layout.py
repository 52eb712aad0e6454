"""Layouts: what a model says about its tensors, and where each lies in a slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmlane.datatypes import DTYPES
from shmlane.errors import ProtocolError, TensorMismatch, UnknownTensor, UsageError
from shmlane.layout import SlotLayout
from shmlane.metadata import ModelMetadata, Shape, TensorSpec, expect, lookup
from shmlane.regions import PAGE_BYTES

# Tested against the protocol's own table elsewhere.
SIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()}

Declared = Mapping[str, Iterable[int]]


def tensor(name: str, shape: Iterable[int], datatype: str = "FP32") -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape)}


def model(
    inputs: Iterable[dict[str, Any]],
    outputs: Iterable[dict[str, Any]],
    **config: object,
) -> ModelMetadata:
    metadata = {
        "name": "m",
        "versions": ["1", "3"],
        "platform": "onnx",
        "inputs": list(inputs),
        "outputs": list(outputs),
    }
    return ModelMetadata.from_json(metadata, config, server_version="2.51.0")


def defaults(layout: SlotLayout) -> dict[str, Shape | None]:
    return {plan.spec.name: plan.default for plan in layout.tensors}


# --- datatypes and shapes -------------------------------------------------------------


@pytest.mark.parametrize("datatype", SIZES)
def test_bytes_of_a_tensor_are_its_elements_times_their_size(datatype: str) -> None:
    spec = TensorSpec("x", datatype, (-1, 3))
    assert spec.nbytes((5, 3)) == 15 * SIZES[datatype]
    assert spec.nbytes((0, 3)) == 0
    assert spec.nbytes(()) == SIZES[datatype]
    assert np.zeros((5, 3), spec.dtype).nbytes == spec.nbytes((5, 3))


def test_bytes_of_huge_shapes_do_not_wrap() -> None:
    spec = TensorSpec("x", "FP64", (-1, -1))
    assert spec.nbytes((2**40, 2**40)) == 2**83


@pytest.mark.parametrize("datatype", ["STRING", "BF32", "fp32", ""])
def test_other_datatypes_are_refused_with_those_that_can_be(datatype: str) -> None:
    spec = TensorSpec("words", datatype, (1,))
    with pytest.raises(UsageError) as caught:
        spec.nbytes((1,))
    message = str(caught.value)
    assert f"'words' has datatype {datatype}," in message
    assert all(name in message for name in SIZES)
    assert caught.value.context == {"tensor": "words", "datatype": datatype}


@pytest.mark.parametrize(
    ("shape", "max_batch", "fixed", "fixed_but_for_batch"),
    [
        ((), 0, True, False),
        ((2, 3), 0, True, False),
        ((-1, 3), 0, False, False),
        ((-1, 3), 8, False, True),
        ((-1,), 8, False, True),
        ((-1, -1), 8, False, False),
    ],
)
def test_a_tensor_knows_what_is_open_in_its_shape(
    shape: Shape, max_batch: int, fixed: bool, fixed_but_for_batch: bool
) -> None:
    spec = TensorSpec("x", "FP32", shape, max_batch=max_batch)
    assert spec.is_fixed is fixed
    assert spec.is_fixed_but_for_batch is fixed_but_for_batch


dims = st.integers(0, 9)


@given(st.lists(st.tuples(dims, st.booleans()), max_size=5))
def test_a_shape_that_fits_is_given_back_as_plain_ints(
    pairs: list[tuple[int, bool]],
) -> None:
    spec = TensorSpec("x", "FP32", tuple(-1 if free else dim for dim, free in pairs))
    checked = spec.check_shape(np.array([dim for dim, _ in pairs], np.int64))
    assert checked == tuple(dim for dim, _ in pairs)
    assert all(type(dim) is int for dim in checked)


@given(st.lists(dims, max_size=4), st.lists(st.integers(-2, 9), max_size=4))
def test_a_shape_passes_only_if_every_dimension_fits(
    allowed: list[int], shape: list[int]
) -> None:
    spec = TensorSpec("x", "FP32", tuple(dim or -1 for dim in allowed))
    fits = len(allowed) == len(shape) and all(
        want in (0, dim) and dim >= 0 for want, dim in zip(allowed, shape, strict=True)
    )
    if fits:
        assert spec.check_shape(shape) == tuple(shape)
    else:
        with pytest.raises(TensorMismatch):
            spec.check_shape(shape)


@pytest.mark.parametrize(
    "shape", [(2, 3), (1, 3, 4), (), (1, 4), (-1, 3), (1, -1)], ids=str
)
def test_a_mismatch_names_the_tensor_the_given_and_the_allowed(shape: Shape) -> None:
    told = f" It has {len(shape)} dimensions, the model wants 2."
    rank = "" if len(shape) == 2 else told
    spec = TensorSpec("images", "FP32", (1, 3))
    with pytest.raises(TensorMismatch) as caught:
        spec.check_shape(shape)
    assert str(caught.value) == (
        f"tensor 'images' cannot have shape {shape}: the model allows (1, 3).{rank}"
    )
    assert caught.value.context == {
        "tensor": "images",
        "given": shape,
        "allowed": (1, 3),
    }


def test_a_mismatch_says_what_minus_one_means() -> None:
    spec = TensorSpec("x", "FP32", (-1, 3))
    with pytest.raises(TensorMismatch, match=r"allows \(-1, 3\) \(-1 is any size\)"):
        spec.check_shape((1, 4))


def test_a_batch_over_the_limit_names_the_limit() -> None:
    spec = TensorSpec("images", "FP32", (-1, 3), max_batch=8)
    assert spec.check_shape((8, 3)) == (8, 3)
    with pytest.raises(TensorMismatch) as caught:
        spec.check_shape((9, 3))
    assert str(caught.value) == (
        "tensor 'images' cannot have shape (9, 3): the model takes batches of at most"
        " 8."
    )
    assert caught.value.context == {
        "tensor": "images",
        "given": (9, 3),
        "max_batch": 8,
    }


@pytest.mark.parametrize(
    "shape", [(1.0, 3), (1.5, 3), ("1", "3"), "13", (None, 3), 3, None], ids=repr
)
def test_what_is_no_shape_is_refused_like_one_that_does_not_fit(shape: Any) -> None:
    spec = TensorSpec("images", "FP32", (-1, 3))
    with pytest.raises(TensorMismatch) as caught:
        spec.check_shape(shape)
    message = str(caught.value)
    assert f"'images' cannot have shape {shape!r}" in message
    assert "(-1, 3)" in message


def test_a_tensor_shows_its_declaration() -> None:
    spec = TensorSpec("x", "FP32", (-1, 3))
    assert repr(spec) == "<x FP32 [-1, 3]>"
    optional = TensorSpec("x", "FP32", (), optional=True)
    assert repr(optional) == "<x FP32 [] optional>"


# --- what the server says about the model ---------------------------------------------


def test_metadata_and_configuration_are_joined() -> None:
    found = model(
        [tensor("a", [-1, 3], "UINT8"), tensor("b", [-1, 2])],
        [tensor("y", [-1, 5], "INT64")],
        max_batch_size=4,
        input=[{"name": "a"}, {"name": "b", "optional": True}],
    )
    assert (found.name, found.versions, found.platform) == ("m", ("1", "3"), "onnx")
    assert (found.max_batch_size, found.server_version) == (4, "2.51.0")
    assert dict(found.inputs) == {
        "a": TensorSpec("a", "UINT8", (-1, 3), optional=False, max_batch=4),
        "b": TensorSpec("b", "FP32", (-1, 2), optional=True, max_batch=4),
    }
    assert dict(found.outputs) == {
        "y": TensorSpec("y", "INT64", (-1, 5), max_batch=4),
    }
    assert not found.decoupled


def test_a_model_without_a_readable_configuration_does_not_batch() -> None:
    found = model([tensor("a", [-1, 3])], [tensor("y", [3])])
    assert (found.max_batch_size, found.decoupled) == (0, False)
    assert not found.inputs["a"].optional
    assert not found.inputs["a"].is_fixed_but_for_batch


def test_a_decoupled_model_says_so() -> None:
    policy = {"decoupled": True}
    assert model([], [], model_transaction_policy=policy).decoupled


WELL_FORMED: dict[str, Any] = {
    "name": "m",
    "versions": ["1"],
    "platform": "onnx",
    "inputs": [tensor("a", [-1, 3])],
    "outputs": [tensor("y", [3])],
}


def in_place_of_a(**difference: object) -> dict[str, Any]:
    return {"inputs": [tensor("a", [-1, 3]) | difference]}


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ([1], "the model's metadata is [1], not an object"),
        ({"name": None}, "the name in the model's metadata is None, not a string"),
        ({"versions": "1"}, "versions in the model's metadata is '1', not a list"),
        ({"versions": [1]}, "a version in the model's metadata is 1, not a string"),
        ({"platform": []}, "the platform in the model's metadata is [], not a string"),
        ({"inputs": None}, "inputs in the model's metadata is None, not a list"),
        ({"outputs": {}}, "outputs in the model's metadata is {}, not a list"),
        ({"outputs": ["y"]}, "an output in the model's metadata is 'y', not an obj"),
        ({"inputs": [{}]}, "the name of an input in the model's metadata is None, not"),
        (in_place_of_a(datatype=5), "the datatype of input 'a' in the model's metad"),
        (in_place_of_a(shape=None), "the shape of input 'a' in the model's metadata"),
        (in_place_of_a(shape=["3"]), "a size in the shape of input 'a' in the model"),
        (in_place_of_a(shape=[True]), "is True, not a whole number"),
        (in_place_of_a(shape=[3.0]), "is 3.0, not a whole number"),
        (in_place_of_a(shape=[-2]), "is [-2]; sizes are -1 (any) or more"),
        ({"inputs": [tensor("a", [1])] * 2}, "input 'a' is there twice"),
        ({"inputs": "a" * 10**6}, "aaa…, not a list"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_metadata_of_another_form_are_refused_by_what_is_wrong(
    metadata: object, told: str
) -> None:
    if isinstance(metadata, dict):
        metadata = WELL_FORMED | metadata
    with pytest.raises(ProtocolError) as caught:
        ModelMetadata.from_json(metadata, {}, server_version="2.51.0")
    assert told in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ([1], "the model's configuration is [1], not an object"),
        ({"max_batch_size": "8"}, "max_batch_size in the model's configuration is '8'"),
        ({"max_batch_size": -1}, "max_batch_size in the model's configuration is -1"),
        ({"input": {}}, "input in the model's configuration is {}, not a list"),
        ({"input": ["a"]}, "an input in the model's configuration is 'a', not an obj"),
        ({"input": [{}]}, "the name of an input in the model's configuration is None"),
        ({"input": [{"name": "a", "optional": 1}]}, "optional of input 'a' in the mod"),
        ({"model_transaction_policy": []}, "model_transaction_policy in the model's"),
        ({"model_transaction_policy": {"decoupled": "no"}}, "decoupled in the model's"),
    ],
    ids=str,
)
def test_a_configuration_of_another_form_is_refused_by_what_is_wrong(
    config: object, told: str
) -> None:
    with pytest.raises(ProtocolError) as caught:
        ModelMetadata.from_json(WELL_FORMED, config, server_version="2.51.0")
    assert told in str(caught.value)


def test_what_a_server_says_is_given_back_where_it_is_of_the_kind_expected() -> None:
    assert expect(list, [1], "the index") == [1]
    with pytest.raises(ProtocolError, match="the index is None, not a list"):
        expect(list, None, "the index")


# --- where tensors lie ----------------------------------------------------------------

specs = st.tuples(
    st.sampled_from(sorted(SIZES)), st.lists(st.integers(0, 300), max_size=3)
)


@given(st.lists(specs, max_size=4), st.lists(specs, min_size=1, max_size=4))
def test_blocks_are_aligned_hold_their_tensor_and_never_overlap(
    inputs: list[tuple[str, list[int]]], outputs: list[tuple[str, list[int]]]
) -> None:
    metadata = model(
        [tensor(f"i{n}", shape, kind) for n, (kind, shape) in enumerate(inputs)],
        [tensor(f"o{n}", shape, kind) for n, (kind, shape) in enumerate(outputs)],
    )
    layout = SlotLayout.plan(metadata)
    assert [plan.spec for plan in layout.tensors] == [
        *metadata.inputs.values(),
        *metadata.outputs.values(),
    ]
    assert [plan.is_input for plan in layout.tensors] == [
        *[True] * len(inputs),
        *[False] * len(outputs),
    ]
    end = 0
    for plan in layout.tensors:
        assert plan.offset % 64 == 0
        assert end <= plan.offset < end + 64
        assert plan.default == plan.spec.shape
        assert plan.capacity == plan.spec.nbytes(plan.spec.shape)
        end = plan.offset + plan.capacity
    assert layout.nbytes % PAGE_BYTES == 0
    assert end <= layout.nbytes < max(end, 1) + PAGE_BYTES


@pytest.mark.parametrize(
    ("nbytes", "pages"), [(0, 1), (1, 1), (PAGE_BYTES, 1), (PAGE_BYTES + 1, 2)]
)
def test_a_slot_is_the_fewest_whole_pages_and_one_at_least(
    nbytes: int, pages: int
) -> None:
    layout = SlotLayout.plan(model([], [tensor("y", [nbytes], "UINT8")]))
    assert layout.nbytes == pages * PAGE_BYTES


def test_an_open_shape_takes_no_room_until_it_is_declared() -> None:
    metadata = model([tensor("a", [-1, 3])], [tensor("y", [-1])])
    layout = SlotLayout.plan(metadata)
    assert defaults(layout) == {"a": None, "y": None}
    assert [plan.capacity for plan in layout.tensors] == [0, 0]
    declared = SlotLayout.plan(metadata, shapes={"a": (5, 3)}, outputs={"y": (7,)})
    assert defaults(declared) == {"a": (5, 3), "y": (7,)}
    assert [plan.capacity for plan in declared.tensors] == [60, 28]


def test_a_declared_shape_may_be_any_iterable_of_ints() -> None:
    metadata = model([tensor("a", [-1, 3])], [tensor("y", [1])])
    layout = SlotLayout.plan(metadata, shapes={"a": iter(np.array([2, 3]))})
    assert defaults(layout)["a"] == (2, 3)


def test_an_optional_input_has_a_block_like_any_other() -> None:
    config = {"input": [{"name": "b", "optional": True}]}
    metadata = model([tensor("a", [4]), tensor("b", [4])], [tensor("y", [4])], **config)
    assert [plan.capacity for plan in SlotLayout.plan(metadata).tensors] == [16] * 3


# --- models that batch ----------------------------------------------------------------


def batching() -> ModelMetadata:
    return model(
        [tensor("a", [-1, 3]), tensor("b", [-1, 2])],
        [tensor("y", [-1, 5]), tensor("z", [-1, -1])],
        max_batch_size=8,
    )


def test_inputs_of_a_batching_model_start_with_a_batch_of_one() -> None:
    layout = SlotLayout.plan(batching())
    assert defaults(layout) == {"a": (1, 3), "b": (1, 2), "y": (1, 5), "z": None}


def test_outputs_of_a_batching_model_hold_the_largest_declared_batch() -> None:
    layout = SlotLayout.plan(batching(), shapes={"a": (4, 3), "b": (6, 2)})
    assert defaults(layout) == {"a": (4, 3), "b": (6, 2), "y": (6, 5), "z": None}


def test_a_declared_output_of_a_batching_model_keeps_its_shape() -> None:
    layout = SlotLayout.plan(
        batching(), shapes={"a": (4, 3)}, outputs={"y": (2, 5), "z": (4, 9)}
    )
    assert (defaults(layout)["y"], defaults(layout)["z"]) == ((2, 5), (4, 9))


@pytest.mark.parametrize("declared", [{"a": (9, 3)}, {"a": (9, 4)}, {"a": (3,)}])
def test_declared_inputs_must_fit_the_model(declared: Declared) -> None:
    with pytest.raises(TensorMismatch, match="tensor 'a' cannot have shape"):
        SlotLayout.plan(batching(), shapes=declared)


@pytest.mark.parametrize("declared", [{"y": (9, 5)}, {"y": (1, 6)}, {"y": ()}])
def test_declared_outputs_must_fit_the_model(declared: Declared) -> None:
    with pytest.raises(TensorMismatch, match="tensor 'y' cannot have shape"):
        SlotLayout.plan(batching(), outputs=declared)


def test_an_open_dimension_behind_the_batch_is_not_guessed() -> None:
    metadata = model([tensor("a", [-1, -1])], [tensor("y", [-1, -1])], max_batch_size=8)
    layout = SlotLayout.plan(metadata, shapes={"a": (8, 9)})
    assert defaults(layout) == {"a": (8, 9), "y": None}


# --- which outputs --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "chosen"),
    [
        (None, ["y", "z"]),
        (["z"], ["z"]),
        (("z", "y"), ["z", "y"]),
        pytest.param(iter(["y"]), ["y"], id="an iterator"),
        ({"z": (8, 9)}, ["z"]),
        (["y", "y"], ["y"]),
    ],
    ids=repr,
)
def test_outputs_may_be_chosen_in_any_way(
    outputs: Iterable[str] | Declared | None, chosen: list[str]
) -> None:
    layout = SlotLayout.plan(batching(), outputs=outputs)
    names = [plan.spec.name for plan in layout.tensors if not plan.is_input]
    assert names == chosen


def test_one_string_is_not_taken_for_a_list_of_letters() -> None:
    with pytest.raises(UsageError, match="outputs='yz' is one string"):
        SlotLayout.plan(batching(), outputs="yz")


@pytest.mark.parametrize(
    "outputs", [[], {}, pytest.param(iter(()), id="an iterator")], ids=repr
)
def test_asking_for_no_output_is_refused(outputs: Iterable[str]) -> None:
    with pytest.raises(UsageError, match="name at least one output"):
        SlotLayout.plan(batching(), outputs=outputs)


def test_unknown_names_are_refused_with_those_that_exist() -> None:
    with pytest.raises(UnknownTensor) as caught:
        SlotLayout.plan(batching(), shapes={"c": (1, 3)})
    assert str(caught.value) == "there is no input 'c'; this model has: 'a', 'b'."
    assert caught.value.context == {"tensor": "c"}
    for outputs in (["c"], {"c": (1,)}):
        with pytest.raises(UnknownTensor, match=r"no output 'c'; .* has: 'y', 'z'"):
            SlotLayout.plan(batching(), outputs=outputs)


def test_a_name_among_none_says_none() -> None:
    with pytest.raises(UnknownTensor, match="this model has: none"):
        lookup({}, "x", "input")


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ((3, 224, 224), "array[None]"),
        ((1, 224, 224, 3), "transpose(0, 3, 1, 2)"),
        ((1, 224.5, 3, 1), "whole number"),
    ],
)
def test_a_likely_mistake_in_a_shape_is_named(given: Any, advice: str) -> None:
    spec = TensorSpec("x", "FP32", (-1, 3, 224, 224), max_batch=8)
    with pytest.raises(TensorMismatch) as caught:
        spec.check_shape(given)
    assert advice in caught.value.hint


def test_undeclared_inputs_of_a_batch_follow_the_declared_one() -> None:
    inputs = {
        name: TensorSpec(name, "FP32", (-1, 4), max_batch=8) for name in ("a", "b")
    }
    outputs = {"y": TensorSpec("y", "FP32", (-1, 2), max_batch=8)}
    metadata = ModelMetadata("m", ("1",), "", inputs, outputs, 8, "2.51.0")
    plan = SlotLayout.plan(metadata, shapes={"a": (3, 4)})
    assert [each.default for each in plan.tensors] == [(3, 4), (3, 4), (3, 2)]
