"""Ports that are held: nobody else is given one, and a server may listen on it."""

from __future__ import annotations

import gc
import socket
import sys
import weakref

import pytest

from shmlane.ports import LOOPBACK, HeldPort
from tests.unit.loopback import is_kept

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone holds one")


def listening(port: int) -> socket.socket:
    """As servers do, who want their port again at once."""
    return socket.create_server((LOOPBACK, port))


def test_a_held_port_is_given_to_nobody_else() -> None:
    held = HeldPort()
    assert is_kept(f"{LOOPBACK}:{held.port}")
    assert repr(held) == f"<HeldPort {held.port}>"


def test_a_server_may_listen_on_it_again_and_again() -> None:
    held = HeldPort()
    for _ in range(3):
        with (
            listening(held.port) as listener,
            socket.create_connection((LOOPBACK, held.port)) as client,
        ):
            accepted, _ = listener.accept()
            with accepted:
                client.sendall(b"x")
                assert accepted.recv(1) == b"x"
        assert is_kept(f"{LOOPBACK}:{held.port}")


def test_each_is_another() -> None:
    held = [HeldPort() for _ in range(50)]
    assert len({each.port for each in held}) == 50


def test_a_port_that_nobody_holds_any_more_is_free() -> None:
    held = [HeldPort() for _ in range(5)]
    ports, ended = [each.port for each in held], weakref.ref(held[0])
    del held
    gc.collect()
    assert ended() is None
    # Other programs are given ports meanwhile, but hardly all of these.
    assert any(is_free(port) for port in ports)


def is_free(port: int) -> bool:
    with socket.socket() as other:
        try:
            other.bind((LOOPBACK, port))
        except OSError:
            return False
        return True
