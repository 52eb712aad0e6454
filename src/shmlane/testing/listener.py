"""The sockets and threads of one server process: listening, accepting, ending.

Owns one thread that accepts and one thread per connection, and ends them all. Listens
on loopback or a Unix socket only. Refuses to read or write.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable

from ..errors import UsageError
from ..ports import LOOPBACK, HeldPort

_BACKLOG = 128
_NO_LINGER = struct.pack("ii", 1, 0)


class Address:
    """Where a server listens, the same over all its starts.

    That is the path of a Unix socket, or a port of loopback which the first start
    chooses, and which nobody else is given between two of them.
    """

    def __init__(self, unix_socket: str | os.PathLike[str] | None) -> None:
        self._path = None if unix_socket is None else os.path.abspath(unix_socket)
        self._held: HeldPort | None = None

    def __repr__(self) -> str:
        return f"<Address {self._path or self._held}>"

    @property
    def url(self) -> str:
        """What `Session` takes; valid from the first `listen` on."""
        if self._path is not None:
            return f"unix://{self._path}"
        if self._held is None:
            raise UsageError(
                "this server has no address before it is started.",
                hint="Use it in a with block, or call start().",
            )
        return f"{LOOPBACK}:{self._held.port}"

    def listen(self) -> socket.socket:
        """A listening socket."""
        if self._path is not None:
            return _listen(socket.AF_UNIX, self._path)
        if self._held is None:
            self._held = HeldPort()
        return _listen(socket.AF_INET, (LOOPBACK, self._held.port))


def _listen(family: int, address: str | tuple[str, int]) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        # The port is held, and connections of a server that has ended are on it.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def reset(connected: socket.socket) -> None:
    """Close with RST, so that the other side sees an error and not an end."""
    with contextlib.suppress(OSError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    connected.close()


class Listener:
    """Runs `serve(connected)` in a thread for each connection to `listening`.

    serve: closes its socket itself, at the latest when it returns.
    """

    def __init__(
        self, listening: socket.socket, serve: Callable[[socket.socket], None]
    ) -> None:
        # A client that leaves before it is accepted must not hold the thread.
        listening.setblocking(False)
        self._listening = listening
        self._serve = serve
        self._lock = threading.Lock()
        self._is_ended = False
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._wake, self._woken = socket.socketpair()
        # Daemons: a server that was forgotten does not keep its program alive.
        self._accepting = threading.Thread(
            target=self._accept, name="scripted server", daemon=True
        )
        self._accepting.start()

    def end(self) -> None:
        """Stop listening and break every connection; does not wait for threads."""
        with self._lock:
            if self._is_ended:
                return
            # In this order: once ended, the thread that accepts closes both sockets.
            self._wake.send(b"\0")
            self._is_ended = True
        self.break_off()

    def break_off(self) -> None:
        """Break the connections that exist now."""
        with self._lock:
            for connected in self._connections:
                _break(connected)

    def join(self) -> None:
        """Wait for all threads; a thread that calls this does not wait for itself."""
        self._accepting.join()
        with self._lock:
            threads = list(self._connections.values())
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _accept(self) -> None:
        with (
            self._listening,
            self._wake,
            self._woken,
            selectors.DefaultSelector() as selector,
        ):
            for each in (self._listening, self._woken):
                selector.register(each, selectors.EVENT_READ)
            while not self._is_ended:
                selector.select()
                self._take_in()
            self._remove_path()

    def _take_in(self) -> None:
        with contextlib.suppress(OSError):
            connected, _ = self._listening.accept()
            thread = threading.Thread(
                target=self._run, args=(connected,), name="scripted reply", daemon=True
            )
            with self._lock:
                if self._is_ended:
                    connected.close()
                else:
                    self._connections[connected] = thread
                    thread.start()

    def _run(self, connected: socket.socket) -> None:
        try:
            with connected:
                self._serve(connected)
        finally:
            with self._lock:
                self._connections.pop(connected, None)

    def _remove_path(self) -> None:
        path = self._listening.getsockname()
        if isinstance(path, str):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _break(connected: socket.socket) -> None:
    # Wakes the thread that reads; closing under it would not.
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
