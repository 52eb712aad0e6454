"""Buffers: what is to leave is never copied, and no body is written over another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmlane import buffers
from shmlane.buffers import Inbox, Outbox

LINE = 64


def address(view: memoryview) -> int:
    first: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return first


# --- what leaves ----------------------------------------------------------------------


@given(st.lists(st.binary(max_size=9), max_size=20), st.data())
def test_parts_leave_in_their_order_however_much_goes_at_a_time(
    parts: list[bytes], data: st.DataObject
) -> None:
    outbox = Outbox(parts)
    assert outbox.nbytes == len(b"".join(parts))
    sent = b""
    while outbox.left:
        offered = b"".join(outbox.batch())
        count = data.draw(st.integers(0, len(offered)))
        outbox.advance(count)
        sent += offered[:count]
        assert outbox.left == outbox.nbytes - len(sent)
    assert sent == b"".join(parts)
    assert outbox.batch() == []


def test_a_batch_is_no_longer_than_the_kernel_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buffers, "_MOST_BUFFERS", 3)
    outbox = Outbox([b"ab", b"", b"c", b"d", b"ef"])
    assert b"".join(outbox.batch()) == b"abcd"
    outbox.advance(3)
    assert b"".join(outbox.batch()) == b"def"


def test_arrays_of_any_type_and_shape_leave_from_where_they_lie() -> None:
    array = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    outbox = Outbox([array.data, np.empty((0, 3)).data, b"."])
    first, second = outbox.batch()
    assert address(first) == array.__array_interface__["data"][0]
    assert (first.tobytes(), bytes(second)) == (array.tobytes(), b".")


def test_what_does_not_lie_in_one_piece_is_refused() -> None:
    with pytest.raises(TypeError, match="contiguous"):
        Outbox([np.zeros((4, 4)).data[::2]])


def test_an_outbox_shows_what_is_left() -> None:
    outbox = Outbox([b"abc"])
    outbox.advance(1)
    assert repr(outbox) == "<Outbox 2 of 3 bytes left>"


# --- what arrives ---------------------------------------------------------------------


@given(st.integers(0, 300), st.integers(0, 300))
def test_the_aligned_byte_lies_on_a_cache_line(nbytes: int, aligned: int) -> None:
    inbox = Inbox()
    for _ in range(2):
        view = inbox.take(nbytes, aligned)
        assert (len(view), view.readonly) == (nbytes, False)
        if aligned < nbytes:
            assert address(view[aligned:]) % LINE == 0


@pytest.mark.skipif(not buffers._COUNTS_ARE_EXACT, reason="needs the GIL")
def test_memory_that_nobody_looks_into_is_used_again() -> None:
    inbox = Inbox()
    first = address(inbox.take(10_000))
    assert address(inbox.take(10_000)) == first
    assert address(inbox.take(100)) == first
    assert repr(inbox) == "<Inbox of 10064 bytes, at rest>"


@pytest.mark.parametrize(
    "look",
    [
        lambda view: view,
        lambda view: view[3:5],
        lambda view: view.toreadonly(),
        lambda view: view.cast("f"),
        lambda view: np.frombuffer(view, np.float32),
        lambda view: np.frombuffer(view, np.float32).reshape(50, 2)[::2].T,
        lambda view: np.asarray(view)[7:],
    ],
    ids=["whole", "part", "read only", "cast", "array", "view of array", "bytes"],
)
def test_memory_that_anybody_looks_into_is_left_alone(
    look: Callable[[memoryview], object],
) -> None:
    inbox = Inbox()
    view = inbox.take(400)
    view[:] = b"1" * 400
    kept = look(view)
    before = bytes(memoryview(kept))  # type: ignore[arg-type]
    place = address(view)
    del view
    assert repr(inbox) == "<Inbox of 464 bytes, in use>"
    second = inbox.take(400)
    second[:] = b"2" * 400
    assert address(second) != place
    assert bytes(memoryview(kept)) == before  # type: ignore[arg-type]


def test_where_references_cannot_be_counted_every_body_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buffers, "_COUNTS_ARE_EXACT", False)
    inbox = Inbox()
    inbox.take(10)[:] = b"1" * 10
    # All that ever was is counted as still in use.
    assert repr(inbox) == "<Inbox of 74 bytes, in use>"


def test_more_than_there_is_leaves_an_inbox_that_works() -> None:
    inbox = Inbox()
    inbox.take(100)
    with pytest.raises(MemoryError):
        inbox.take(1 << 62)
    assert len(inbox.take(100)) == 100
