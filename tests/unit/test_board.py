"""Connections watched together: what is told, what is not, and the bell."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from shmlane.board import Board
from tests.unit.loopback import LONG

# How many connections one wait tells of.
MOST = 64


class Line:
    """A connection as a board sees it, and its far end."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()

    def fileno(self) -> int:
        return self.near.fileno()

    def say(self, data: bytes = b"x") -> None:
        self.far.sendall(data)

    def read(self) -> bytes:
        return self.near.recv(65536)

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.fixture
def board() -> Iterator[Board[str]]:
    made: Board[str] = Board()
    yield made
    made.close()


@pytest.fixture
def lines() -> Iterator[list[Line]]:
    made = [Line() for _ in range(3)]
    yield made
    for each in made:
        each.close()


def at_the_number_of(line: Line) -> Line:
    """Another connection, which gets the number of the one that is closed here."""
    number = line.fileno()
    line.close()
    other = Line()
    # Two sockets were made, and either may have the number.
    if other.far.fileno() == number:
        other.near, other.far = other.far, other.near
    assert other.fileno() == number
    return other


def test_each_thing_that_comes_is_told_once(
    board: Board[str], lines: list[Line]
) -> None:
    for name, line in zip("abc", lines, strict=True):
        board.expect(line, name)
    assert repr(board) == "<Board 3 expected on 3 connections>"
    lines[2].say()
    lines[0].say()
    assert sorted(board.wait(LONG)) == ["a", "c"]
    assert repr(board) == "<Board 1 expected on 3 connections>"
    assert not board.is_empty
    lines[1].say()
    # What the others have to say is for nobody now, though it is still there.
    assert board.wait(LONG) == ["b"]
    assert board.is_empty


def test_who_wants_more_says_so(board: Board[str], lines: list[Line]) -> None:
    line = lines[0]
    for count in range(5):
        board.expect(line, f"request {count}")
        assert board.wait(0) == []
        line.say()
        assert board.wait(LONG) == [f"request {count}"]
        assert line.read() == b"x"


def test_what_comes_for_nobody_is_not_told_and_wakes_nobody_again(
    board: Board[str], lines: list[Line]
) -> None:
    line = lines[0]
    board.expect(line, "a")
    line.say()
    assert board.wait(LONG) == ["a"]
    assert board.wait(0) == []
    assert repr(board) == "<Board 0 expected on 0 connections>"
    board.expect(line, "b")
    assert board.wait(LONG) == ["b"]


def test_what_is_forgotten_is_not_told(board: Board[str], lines: list[Line]) -> None:
    board.expect(lines[0], "a")
    board.expect(lines[1], "b")
    board.forget("a")
    lines[0].say()
    lines[1].say()
    assert board.wait(LONG) == ["b"]
    assert board.is_empty


def test_the_last_who_expects_something_on_a_connection_is_told(
    board: Board[str], lines: list[Line]
) -> None:
    board.expect(lines[0], "first")
    board.expect(lines[0], "second")
    lines[0].say()
    assert board.wait(LONG) == ["second"]


def test_the_end_of_a_connection_is_something_that_comes(
    board: Board[str], lines: list[Line]
) -> None:
    board.expect(lines[0], "a")
    lines[0].far.close()
    assert board.wait(LONG) == ["a"]


def test_a_connection_with_the_number_of_a_closed_one_is_another(
    board: Board[str], lines: list[Line]
) -> None:
    for name in ("a", "b", "c"):
        board.expect(lines[0], name)
        lines[0] = at_the_number_of(lines[0])
        assert board.wait(0) == []
        board.expect(lines[0], f"new {name}")
        lines[0].say()
        assert board.wait(LONG) == [f"new {name}"]


def test_a_closed_connection_cannot_be_watched(
    board: Board[str], lines: list[Line]
) -> None:
    lines[0].close()
    with pytest.raises((ValueError, OSError)):
        board.expect(lines[0], "a")
    assert board.is_empty


def test_more_than_one_wait_tells_of_is_told_by_the_next(board: Board[str]) -> None:
    lines = [Line() for _ in range(MOST + 10)]
    try:
        for number, line in enumerate(lines):
            board.expect(line, str(number))
            line.say()
        told: list[str] = []
        while len(told) < len(lines):
            came = board.wait(LONG)
            assert 0 < len(came) <= MOST
            told += came
        assert sorted(told, key=int) == [str(number) for number in range(len(lines))]
    finally:
        for line in lines:
            line.close()


def test_a_look_finds_all_that_stirs_and_takes_nothing_from_a_wait(
    board: Board[str],
) -> None:
    lines = [Line() for _ in range(MOST + 10)]
    try:
        for number, line in enumerate(lines):
            board.expect(line, str(number))
        assert board.stirred() == set()
        board.wait(0)
        for line in lines[2:]:
            line.say()
        lines[1].far.close()
        stirred = {line.fileno() for line in lines[1:]}
        assert board.stirred() == board.stirred() == stirred
        told = board.wait(LONG)
        # Also where nothing is expected any more.
        assert board.stirred() == stirred
        told += board.wait(LONG)
        assert sorted(told, key=int) == [str(number) for number in range(1, len(lines))]
    finally:
        for line in lines:
            line.close()


def test_the_bell_ends_a_wait_or_the_next_one(
    board: Board[str], lines: list[Line]
) -> None:
    board.expect(lines[0], "a")
    for _ in range(3):
        board.ring()
    assert board.wait(LONG) == []
    # However often it was rung.
    assert board.wait(0) == []
    ringing = threading.Timer(0.01, board.ring)
    ringing.start()
    begun = time.monotonic()
    assert board.wait(LONG) == []
    assert time.monotonic() - begun < LONG
    ringing.join()
    lines[0].say()
    assert board.wait(LONG) == ["a"]


def test_a_bell_that_nobody_hears_is_never_waited_for(board: Board[str]) -> None:
    for _ in range(100_000):
        board.ring()
    while board.wait(0.0):
        pass


def test_a_bell_that_is_gone_is_rung_in_vain() -> None:
    board: Board[str] = Board()
    board.close()
    board.ring()


def test_a_wait_ends_in_time(board: Board[str], lines: list[Line]) -> None:
    board.expect(lines[0], "a")
    begun = time.monotonic()
    assert board.wait(0.02) == []
    assert 0.015 < time.monotonic() - begun < LONG


def test_what_it_opened_is_closed_with_it(lines: list[Line]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    board: Board[str] = Board()
    board.expect(lines[0], "a")
    board.close()
    # There may be fewer: what earlier tests had may end only now.
    assert len(os.listdir("/proc/self/fd")) <= before


def test_without_descriptors_nothing_stays_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> tuple[socket.socket, socket.socket]:
        raise OSError(24, "Too many open files")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(socket, "socketpair", refuse)
    with pytest.raises(OSError, match="Too many"):
        Board()
    # There may be fewer: what earlier tests had may end only now.
    assert len(os.listdir("/proc/self/fd")) <= before


def test_connections_that_were_closed_are_not_kept(board: Board[str]) -> None:
    """Whether or not their numbers come again."""
    alive: weakref.WeakSet[Line] = weakref.WeakSet()
    with contextlib.ExitStack() as taken:
        null = os.open(os.devnull, os.O_RDONLY)
        taken.callback(os.close, null)
        for _ in range(4 * MOST):
            line = Line()
            alive.add(line)
            board.expect(line, "a reply")
            board.forget("a reply")
            number = line.fileno()
            line.close()
            # From now on another file has its number, whichever else are free.
            other = fcntl.fcntl(null, fcntl.F_DUPFD, number)
            taken.callback(os.close, other)
            assert other == number
    gc.collect()
    assert len(alive) <= MOST
