"""Options of one request: what goes on the wire, and what is refused before."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shmlane.errors import TensorMismatch, UnknownTensor, UsageError
from shmlane.metadata import TensorSpec
from shmlane.options import RequestOptions

INT64 = (-(2**63), 2**63 - 1)
OWN = (
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "priority",
    "timeout",
    "binary_data_output",
)


def on_the_wire(options: RequestOptions) -> dict[str, Any]:
    """The parameters as a server reads them."""
    content = options.json_parameters()
    document = json.loads("{" + content + "}", parse_constant=pytest.fail)
    parameters = document.get("parameters", {})
    assert document == ({"parameters": parameters} if content else {})
    assert isinstance(parameters, dict)
    return parameters


# --- what is sent ---------------------------------------------------------------------


def test_without_options_nothing_is_sent() -> None:
    options = RequestOptions()
    assert options.json_parameters() == ""
    assert not options.has_sequence
    assert repr(options) == "RequestOptions()"


def test_everything_that_is_given_is_sent_under_tritons_names() -> None:
    options = RequestOptions(
        id="frame-7",
        priority=2,
        queue_timeout=0.25,
        sequence_id=5,
        sequence_start=True,
        sequence_end=True,
        parameters={"threshold": 0.5, "mode": 'a "b"', "top": -3, "fast": True},
        headers={"traceparent": "00-ab-cd-01", "X-Key": "k"},
    )
    assert on_the_wire(options) == {
        "threshold": 0.5,
        "mode": 'a "b"',
        "top": -3,
        "fast": True,
        "priority": 2,
        "timeout": 250_000,
        "sequence_id": 5,
        "sequence_start": True,
        "sequence_end": True,
    }


@given(
    st.dictionaries(
        st.text("abcXYZ_-.ä\"\\'/ 漢", min_size=1),
        st.one_of(
            st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
            st.integers(*INT64),
            st.floats(allow_nan=False, allow_infinity=False),
            st.booleans(),
        ),
    )
)
@example({"a": INT64[0], "b": INT64[1], "c": 5e-324, "d": -0.0, "e": "\n\u2028😀"})
def test_parameters_arrive_with_their_values_and_types(
    parameters: dict[str, str | int | float | bool],
) -> None:
    options = RequestOptions(parameters=parameters)
    assert options.json_parameters().isascii()
    received = on_the_wire(options)
    assert received == parameters
    for name, value in received.items():
        assert type(value) is type(parameters[name])


def test_scalars_of_numpy_are_sent_as_what_they_hold() -> None:
    parameters: dict[str, Any] = {
        "i": np.int64(-3),
        "f": np.float32(0.5),
        "b": np.bool_(True),
        "s": np.str_("x"),
    }
    count: Any = np.int32(2)
    options = RequestOptions(parameters=parameters, priority=count, sequence_id=count)
    assert on_the_wire(options) == {
        "i": -3,
        "f": 0.5,
        "b": True,
        "s": "x",
        "priority": 2,
        "sequence_id": 2,
    }


@pytest.mark.parametrize(
    ("seconds", "microseconds"),
    [(1, 1_000_000), (0.1, 100_000), (1e-9, 1), (1e9, 10**15), (2.5e-6, 2)],
)
def test_a_queue_timeout_is_sent_in_microseconds_and_never_as_none(
    seconds: float, microseconds: int
) -> None:
    options = RequestOptions(queue_timeout=seconds)
    assert on_the_wire(options) == {"timeout": microseconds}


@pytest.mark.parametrize("sequence", [1, 2**64 - 1, "a", "s" * 128, "ä" * 64])
def test_a_sequence_is_a_number_or_a_text(sequence: int | str) -> None:
    options = RequestOptions(sequence_id=sequence)
    assert options.has_sequence
    assert on_the_wire(options) == {"sequence_id": sequence}


@pytest.mark.parametrize("none", [0, ""])
def test_no_sequence_is_sent_for_zero_or_no_text(none: int | str) -> None:
    options = RequestOptions(sequence_id=none)
    assert not options.has_sequence
    assert options.json_parameters() == ""


# --- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"id": 7}, "id=7): give printable text of at most 256 characters"),
        ({"id": "x" * 257}, "give printable text of at most 256"),
        ({"id": "a\0b"}, r"id='a\x00b'): give printable text"),
        ({"id": "\ud800"}, r"id='\ud800'): give printable text"),
        ({"id": None}, "id=None): give printable text"),
        ({"priority": -1}, "priority=-1): give a whole number from 0"),
        ({"priority": 2**63}, "give a whole number from 0"),
        ({"priority": 1.0}, "priority=1.0): give a whole number"),
        ({"priority": True}, "priority=True): give a whole number"),
        ({"queue_timeout": 0}, "queue_timeout=0): give seconds above 0"),
        ({"queue_timeout": -1.0}, "queue_timeout=-1.0): give seconds above 0"),
        ({"queue_timeout": float("nan")}, "queue_timeout=nan): give seconds"),
        ({"queue_timeout": float("inf")}, "queue_timeout=inf): give seconds"),
        ({"queue_timeout": 1.1e9}, "at most 1000000000, or None"),
        ({"queue_timeout": "1"}, "queue_timeout='1'): give seconds"),
        ({"queue_timeout": True}, "queue_timeout=True): give seconds"),
        ({"sequence_id": -1}, "sequence_id=-1): give a whole number from 0"),
        ({"sequence_id": 2**64}, "to 18446744073709551615, or printable text"),
        ({"sequence_id": "s" * 129}, "at most 128 bytes in UTF-8"),
        ({"sequence_id": "ä" * 65}, "at most 128 bytes in UTF-8"),
        ({"sequence_id": "a\0"}, r"sequence_id='a\x00'): give"),
        ({"sequence_id": True}, "sequence_id=True): give"),
        ({"sequence_id": None}, "sequence_id=None): give"),
        ({"sequence_id": 1, "sequence_start": 1}, "sequence_start=1): give True or"),
        ({"sequence_id": 1, "sequence_end": "no"}, "sequence_end='no'): give True or"),
        ({"sequence_start": True}, "sequence_start=True) without a sequence"),
        (
            {"sequence_end": True, "sequence_id": ""},
            "sequence_end=True) without a sequence: sequence_id='' means none. Give",
        ),
        ({"parameters": [("a", 1)]}, "parameters=[('a', 1)]): give a mapping"),
        ({"parameters": None}, "parameters=None): give a mapping"),
        ({"parameters": {"": 1}}, "parameters={'': 1}): give printable names"),
        ({"parameters": {1: 1}}, "parameters={1: 1}): give printable names"),
        ({"parameters": {"a\0": 1}}, "give printable names, not empty"),
        ({"parameters": {"triton_x": 1}}, "names, Triton reserves those that begin"),
        ({"parameters": {"a": None}}, "parameters={'a': None}): give text, whole"),
        ({"parameters": {"a": b"x"}}, "parameters={'a': b'x'}): give text, whole"),
        ({"parameters": {"a": [1]}}, "json.dumps(value) makes text of lists"),
        ({"parameters": {"a": {}}}, "json.dumps(value) makes text of lists"),
        ({"parameters": {"a": float("nan")}}, "parameters={'a': nan}): give text"),
        ({"parameters": {"a": float("-inf")}}, "parameters={'a': -inf}): give text"),
        ({"parameters": {"a": np.float32("inf")}}, "give text, whole numbers, finite"),
        ({"parameters": {"a": 2**63}}, "whole numbers from -9223372036854775808 to"),
        ({"parameters": {"a": -(2**63) - 1}}, "whole numbers from -922337203685477"),
        ({"parameters": {"a": "x\0y"}}, "give text without NUL"),
        ({"parameters": {"a": "\udfff"}}, "give text without NUL and without lone"),
        ({"classification": ["a"]}, "classification=['a']): give a mapping"),
        ({"classification": {1: 2}}, "classification={1: 2}): give a mapping"),
        ({"classification": {"o": 0}}, "classification={'o': 0}): give how many"),
        ({"classification": {"o": 2**32}}, "a whole number from 1 to 4294967295"),
        ({"classification": {"o": "1"}}, "classification={'o': '1'}): give how many"),
        ({"headers": "X: y"}, "headers='X: y'): give a mapping"),
        ({"headers": {"X": 1}}, "headers=['X']): give a mapping"),
        ({"headers": {"X": "a", "x": "b"}}, "headers=['x']): give each header"),
    ],
    ids=lambda value: str(value)[:40].encode("ascii", "replace").decode(),
)
def test_a_wrong_option_is_named_with_what_is_allowed(
    options: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError) as caught:
        RequestOptions(**options)
    assert str(caught.value).startswith("RequestOptions(")
    assert told in str(caught.value)
    assert caught.value.context["option"] in options


@pytest.mark.parametrize("name", OWN)
def test_tritons_own_parameters_are_refused_as_custom_ones(name: str) -> None:
    with pytest.raises(UsageError, match=f"'{name}': 1.*Triton's own; what sets it is"):
        RequestOptions(parameters={name: 1})


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({"Content-Length": "1"}, "'Content-Length' frames requests"),
        ({"Inference-Header-Content-Length": "1"}, "frames requests"),
        ({"X": "a\r\nY: b"}, "is not a legal HTTP header"),
        ({"X Y": "a"}, "is not a legal HTTP header"),
    ],
)
def test_headers_are_held_to_the_rules_for_those_of_a_session(
    headers: dict[str, str], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        RequestOptions(headers=headers)


def test_a_long_value_is_not_repeated_in_full() -> None:
    with pytest.raises(UsageError) as caught:
        RequestOptions(id="x" * 10_000)
    assert len(str(caught.value)) < 200


# --- classification -------------------------------------------------------------------


def outputs(*datatypes: str) -> dict[str, TensorSpec]:
    return {each: TensorSpec(each, each, (-1, 4)) for each in datatypes}


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "UINT8", "INT8", "UINT64"])
def test_numbers_that_triton_ranks_can_be_classified(datatype: str) -> None:
    options = RequestOptions(classification={datatype: 3})
    options.check_outputs(outputs("BYTES", datatype))
    assert dict(options.classification) == {datatype: 3}


@pytest.mark.parametrize("datatype", ["BYTES", "FP16", "BF16", "BOOL"])
def test_what_triton_cannot_rank_is_refused_before_it_dies_of_it(
    datatype: str,
) -> None:
    options = RequestOptions(classification={"FP32": 1, datatype: 1})
    with pytest.raises(TensorMismatch, match=f"'{datatype}' is {datatype}, which.*FP6"):
        options.check_outputs(outputs("FP32", datatype))


def test_an_output_that_is_not_asked_for_cannot_be_classified() -> None:
    options = RequestOptions(classification={"INT8": 1})
    with pytest.raises(UnknownTensor, match=r"'INT8' is not asked for.*'FP32'\.$"):
        options.check_outputs(outputs("FP32"))
    RequestOptions().check_outputs({})


# --- the object -----------------------------------------------------------------------


def test_what_the_caller_changes_afterwards_changes_nothing() -> None:
    parameters: dict[str, Any] = {"a": 1}
    classes = {"o": 1}
    headers = {"X": "y"}
    options = RequestOptions(
        parameters=parameters, classification=classes, headers=headers
    )
    parameters["timeout"] = classes["o"] = 0
    headers["Host"] = "elsewhere"
    assert on_the_wire(options) == {"a": 1}
    assert options.classification == {"o": 1}
    kept: Any = options.parameters
    with pytest.raises(TypeError):
        kept["timeout"] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.priority = 1  # type: ignore[misc]


def test_a_changed_copy_is_checked_again() -> None:
    options = RequestOptions(sequence_id="s", sequence_start=True, headers={"X": "y"})
    step = dataclasses.replace(options, sequence_start=False, parameters={"a": 1})
    assert on_the_wire(step) == {"a": 1, "sequence_id": "s"}
    with pytest.raises(UsageError, match="without a sequence"):
        dataclasses.replace(options, sequence_id=0)


def test_options_are_the_same_only_if_they_are_one_object() -> None:
    first, second = RequestOptions(priority=1), RequestOptions(priority=1)
    assert first != second
    assert {first: 1, second: 2}[first] == 1


def test_repr_shows_what_was_given_without_the_values_of_headers() -> None:
    options = RequestOptions(
        id="7", priority=1, parameters={"a": 1}, headers={"Authorization": "secret"}
    )
    assert repr(options) == (
        "RequestOptions(id='7', priority=1, parameters={'a': 1},"
        " headers=['Authorization'])"
    )


def test_options_go_to_other_processes() -> None:
    options = RequestOptions(
        id="a", sequence_id=7, parameters={"x": 1}, headers={"X": "y"}
    )
    copied = pickle.loads(pickle.dumps(options))
    assert repr(copied) == repr(options)
    assert copied.headers == options.headers
    assert on_the_wire(copied) == on_the_wire(options)
