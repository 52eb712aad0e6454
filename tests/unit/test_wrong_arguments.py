"""Arguments of another kind than asked for: refused by name before anything is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shmlane import AsyncSession, Session, UsageError
from shmlane.testing import ScriptedServer
from tests.unit.asked import asked, doubling, session_on

GOOD = np.arange(4, dtype=np.float32)

# Before there is a server.
AT_ONCE: dict[str, list[Any]] = {
    "url": [None, 8000, b"localhost:8000", ["localhost"]],
    "model": [None, 5, b"m"],
    "version": [None, True, False, 1.0, b"1", ["1"]],
    "slots": [0, -1, None, "2", 1.5, []],
    "memory": [None, 5, True, ["system"], "System", b"wire"],
    "shapes": [5, "X", [("X", (1,))], (1, 2)],
    "outputs": [5, 1.5, True, object()],
    "rerun": [1, "yes", 0.0],
    "connection": ["keep", {}, 5],
    "timeouts": [5, 1.0, {"infer": 1}],
    "region": [1 << 20, {"max_bytes": 5}, "big"],
}

# Once the model is known.
WHEN_OPENED: list[dict[str, Any]] = [
    {"outputs": [["Y"]]},
    {"outputs": [1]},
    {"outputs": [None]},
    {"outputs": []},
    {"outputs": "Y"},
    {"outputs": ["Z"]},
    {"outputs": {"Z": (1,)}},
    {"outputs": {1: (1,)}},
    {"outputs": {"Y": None}},
    {"outputs": {"Y": "ab"}},
    {"outputs": {"Y": (1.5,)}},
    {"outputs": {"Y": 5.5}},
    {"outputs": {"Y": (-1,)}},
    {"shapes": {"X": None}},
    {"shapes": {"X": "ab"}},
    {"shapes": {"X": (1.5,)}},
    {"shapes": {"X": [[1]]}},
    {"shapes": {"X": (1, 1)}},
    {"shapes": {1: (1,)}},
    {"shapes": {"Z": (1,)}},
    {"shapes": {("X",): (1,)}},
]


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in AT_ONCE.items() for value in values],
)
def test_a_wrong_argument_is_refused_when_the_session_is_made(
    name: str, value: Any
) -> None:
    arguments: dict[str, Any] = {"url": "localhost:8000", "model": "m", name: value}
    with pytest.raises(UsageError, match=name) as caught:
        Session(arguments.pop("url"), arguments.pop("model"), **arguments)
    told = str(caught.value)
    assert repr(value) in told or type(value).__name__ in told


@pytest.mark.parametrize("options", WHEN_OPENED, ids=str)
@pytest.mark.parametrize("memory", ["system", "wire"])
def test_a_wrong_size_or_name_is_refused_when_the_session_is_opened(
    memory: str, options: dict[str, Any]
) -> None:
    with ScriptedServer([doubling()]) as server:
        session = Session(server.url, "doubling", memory=memory, **options)
        with pytest.raises(UsageError):
            session.open()
        assert server.regions == {}
        session.close()


@pytest.mark.parametrize("version", ["1", 1, np.str_("1")])
def test_a_version_is_a_text_or_a_number(version: Any) -> None:
    with session_on(doubling(), version=version) as (server, session):
        assert session.infer({"X": GOOD})["Y"].tolist() == (2 * GOOD).tolist()
        assert server.requests[-1].path == "/v2/models/doubling/versions/1/infer"


WRONG_OPTIONS: list[Any] = [
    {"id": "x"},
    "x",
    5,
    True,
    False,
    (),
    [("id", "x")],
    pytest.param(object(), id="an object"),
    type("RequestOptions", (), {}),
]


@pytest.mark.parametrize("options", WRONG_OPTIONS, ids=repr)
@pytest.mark.parametrize("memory", ["system", "wire"])
def test_options_of_another_type_are_refused_and_the_lease_goes_on(
    memory: str, options: Any
) -> None:
    with session_on(doubling(), memory=memory) as (server, session):
        with session.lease() as lease:
            lease.write("X", GOOD)
            result = lease.infer()
            with pytest.raises(UsageError, match="give RequestOptions"):
                lease.infer(options=options)
            # Nothing was sent: what was read is still there.
            assert result["Y"].tolist() == (2 * GOOD).tolist()
            assert lease.infer()["Y"].tolist() == (2 * GOOD).tolist()
        with pytest.raises(UsageError, match=type(options).__name__):
            session.infer({"X": GOOD}, options=options)
        assert len(asked(server)) == 2
        assert session.stats().free == 1


WRONG_INPUTS: list[Any] = [None, 5, "X", [("X", GOOD)], GOOD, {"X"}]


@pytest.mark.parametrize("inputs", WRONG_INPUTS, ids=lambda each: type(each).__name__)
def test_inputs_that_are_no_mapping_are_refused(inputs: Any) -> None:
    with session_on(doubling()) as (server, session):
        with pytest.raises(UsageError, match=r"give \{name: array\}"):
            session.infer(inputs)
        assert asked(server) == []
        assert session.stats().free == 1


@pytest.mark.parametrize("name", [5, None, ("X",), b"X", "x"])
def test_an_input_that_is_none_of_the_models_is_named(name: Any) -> None:
    with session_on(doubling()) as (server, session):
        with pytest.raises(UsageError, match="there is no input"):
            session.infer({name: GOOD})
        assert asked(server) == []
        assert session.infer({"X": GOOD})["Y"].tolist() == (2 * GOOD).tolist()


# --- functions of streams -------------------------------------------------------------


async def _waits(*_: object) -> None:
    """What a stream would call and never await."""


@pytest.mark.parametrize("name", ["write", "read", "progress"])
@pytest.mark.parametrize(
    "given", [1, object(), "fill", _waits], ids=["int", "object", "str", "coroutine"]
)
def test_what_a_stream_cannot_call_is_refused_at_once(name: str, given: Any) -> None:
    functions: dict[str, Any] = {name: given}
    words = "workers=" if given is _waits else type(given).__name__
    opened = session_on(doubling())
    with opened as (_, session), pytest.raises(UsageError) as caught:
        session.stream([], **functions)
    told = str(caught.value)
    assert name in told
    assert words in told


def test_a_stream_of_tasks_refuses_them_as_well() -> None:
    with pytest.raises(UsageError, match="write is a coroutine function"):
        AsyncSession("localhost:1", "m").stream([], write=_waits)
