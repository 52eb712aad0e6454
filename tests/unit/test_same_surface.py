"""Blocking and asynchronous classes have one surface: what differs is declared here."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from shmlane import AsyncLease, AsyncSession, AsyncStream, Lease, Session, Stream


class Pair(NamedTuple):
    """A blocking class, and the one that event loops have in its place.

    awaited: what waits for a server or for another caller, so that the loop must go on.
    """

    blocking: type
    asynchronous: type
    awaited: frozenset[str]

    def __str__(self) -> str:
        return self.blocking.__name__


PAIRS = (
    Pair(
        Session,
        AsyncSession,
        frozenset(
            ["adopt", "close", "infer", "open", "share", "submit", "warmup"],
        ),
    ),
    Pair(Lease, AsyncLease, frozenset(["infer", "triton_inputs", "triton_outputs"])),
    Pair(Stream, AsyncStream, frozenset(["close"])),
)

# What is not awaited although the blocking one waits, and how one waits then.
AWAITED_LATER = {
    ("Session", "lease"): "async with, or await, on the lease that is returned",
    ("Session", "stream"): "async for on the stream that is returned",
    ("Lease", "submit"): "await on the task that is returned",
}

# Protocols of Python that waiting has other names for.
RENAMED = {
    "__enter__": "__aenter__",
    "__exit__": "__aexit__",
    "__iter__": "__aiter__",
    "__next__": "__anext__",
}
# Special methods that one of them has alone, and why.
ALONE = {
    ("AsyncLease", "__await__"): "lease = await session.lease()",
    ("AsyncLease", "__enter__"): "ending a lease that has begun does not wait",
    ("AsyncLease", "__exit__"): "ending a lease that has begun does not wait",
}

# What stands in the place of a type of the blocking surface.
TYPES = {
    "Session": "AsyncSession",
    "Lease": "AsyncLease",
    "Stream": "AsyncStream",
    "Future": "asyncio.Task",
}
# Of an argument as a whole.
ARGUMENTS = {"Iterable[I]": "Iterable[I] | AsyncIterable[I]"}

# What Python gives to every class, and what has a test of its own.
_NO_PROTOCOL = {"__init__", "__doc__", "__repr__", "__del__", "__annotations__"}
_NO_PROTOCOL |= {"__module__", "__slots__", "__weakref__", "__dict__"}
_NO_PROTOCOL |= {"__orig_bases__", "__parameters__", "__abstractmethods__"}


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def special(cls: type) -> set[str]:
    """Special methods that the package gives to this class."""
    own = (each for each in cls.__mro__ if each.__module__.startswith("shmlane"))
    found = {name for each in own for name in vars(each) if name.startswith("__")}
    inherited = {"__iter__", "__aiter__"} & set(dir(cls))
    return (found | inherited) - _NO_PROTOCOL


def function(cls: type, name: str) -> Callable[..., Any] | None:
    """The function under this name, None for what is no method."""
    found = inspect.getattr_static(cls, name)
    if isinstance(found, classmethod | staticmethod):
        found = found.__func__
    return found if inspect.isfunction(found) else None


def arguments(method: Callable[..., Any]) -> list[tuple[str, object, object]]:
    """Names, kinds and defaults of its parameters, in order."""
    parameters = inspect.signature(method).parameters.values()
    return [(each.name, each.kind, each.default) for each in parameters]


def translated(annotation: str) -> str:
    """A type of the blocking surface, as the asynchronous one has it."""
    if annotation in ARGUMENTS:
        return ARGUMENTS[annotation]
    names = "|".join(TYPES)
    return re.sub(rf"\b({names})\b", lambda found: TYPES[found[0]], annotation)


METHODS = [
    pytest.param(pair, name, id=f"{pair}.{name}")
    for pair in PAIRS
    for name in sorted(public(pair.blocking) & public(pair.asynchronous))
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_both_have_the_same_public_names(pair: Pair) -> None:
    assert public(pair.blocking) == public(pair.asynchronous)
    assert pair.awaited <= public(pair.blocking)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_both_keep_the_protocols_of_python(pair: Pair) -> None:
    """`with` becomes `async with`, `for` becomes `async for`; all else is the same."""

    def shared(cls: type) -> set[str]:
        mine = {name for name in special(cls) if (cls.__name__, name) not in ALONE}
        return {RENAMED.get(name, name) for name in mine}

    assert shared(pair.blocking) == shared(pair.asynchronous)


@pytest.mark.parametrize(("pair", "name"), METHODS)
def test_both_take_the_same_arguments(pair: Pair, name: str) -> None:
    blocking = function(pair.blocking, name)
    asynchronous = function(pair.asynchronous, name)
    if blocking is None or asynchronous is None:
        # A property is one in both.
        kinds = [type(inspect.getattr_static(cls, name)) for cls in pair[:2]]
        assert kinds[0] is kinds[1]
        return
    assert arguments(blocking) == arguments(asynchronous)


@pytest.mark.parametrize(("pair", "name"), METHODS)
def test_both_name_the_same_types(pair: Pair, name: str) -> None:
    methods = [function(cls, name) for cls in pair[:2]]
    if methods[0] is None or methods[1] is None:
        return
    variants = [typing.get_overloads(each) or [each] for each in methods if each]
    assert len(variants[0]) == len(variants[1])
    for blocking, asynchronous in zip(*variants, strict=True):
        wanted = {
            key: translated(annotation)
            for key, annotation in inspect.get_annotations(blocking).items()
        }
        assert inspect.get_annotations(asynchronous) == wanted


@pytest.mark.parametrize(("pair", "name"), METHODS)
def test_what_waits_is_awaited_and_nothing_else(pair: Pair, name: str) -> None:
    method = function(pair.asynchronous, name)
    assert inspect.iscoroutinefunction(method) == (name in pair.awaited)
    assert not inspect.iscoroutinefunction(function(pair.blocking, name))
    assert name not in pair.awaited or (str(pair), name) not in AWAITED_LATER


def test_what_is_declared_exists() -> None:
    classes = {cls.__name__: cls for pair in PAIRS for cls in pair[:2]}
    for cls, name in (*AWAITED_LATER, *ALONE):
        assert hasattr(classes[cls], name)


@pytest.mark.parametrize(("pair", "name"), METHODS)
def test_both_say_what_they_do(pair: Pair, name: str) -> None:
    for cls in pair[:2]:
        assert (inspect.getdoc(getattr(cls, name)) or "").strip()


def test_sessions_are_made_of_the_same_arguments() -> None:
    assert Session.__init__ is AsyncSession.__init__
    one, other = Session("here:1", "m"), AsyncSession("here:1", "m")
    named = [name for name in vars(one) if not name.startswith("_")]
    assert named == [name for name in vars(other) if not name.startswith("_")]
    assert named == ["url", "model", "version"]
