"""Where a server on this machine listens: loopback ports and Unix sockets.

Owns telling that an address is taken before a server trips over it, and removing the
socket file that a dead server left. Refuses to choose ports (`ports`), and to remove a
file that is not a socket, or a socket on which somebody listens.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable
from pathlib import Path

from shmlane.errors import ServerStartFailed, UsageError
from shmlane.ports import LOOPBACK

_LONGEST_UNIX_PATH = 107
_LARGEST_PORT = 65535


def checked_socket_path(path: str | Path) -> str:
    """The absolute path, refused when it is too long for the kernel."""
    absolute = os.path.abspath(path)
    length = len(os.fsencode(absolute))
    if length > _LONGEST_UNIX_PATH:
        raise UsageError(
            f"the Unix socket path {absolute} has {length} bytes; the kernel allows "
            f"{_LONGEST_UNIX_PATH}.",
            hint="Choose a shorter one, for example under /tmp.",
            length=length,
            limit=_LONGEST_UNIX_PATH,
        )
    return absolute


def checked_port(name: str, port: object) -> int:
    """A port of TCP, or 0 for any free one."""
    # True is a number too.
    if type(port) is not int or not 0 <= port <= _LARGEST_PORT:
        raise UsageError(
            f"{name}={port!r} is not a port.",
            hint=f"Give a number up to {_LARGEST_PORT}, or 0 for any free port.",
        )
    return port


def refuse_taken_ports(ports: Iterable[int]) -> None:
    """Raise if another process listens on one of these ports of loopback."""
    for port in ports:
        with socket.socket() as probe:
            # Connections of a server that has ended do not count, as they would not
            # for the next server.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError as error:
                raise ServerStartFailed(
                    f"port {port} of {LOOPBACK} cannot be used: {error.strerror}.",
                    hint="Choose another port, or 0 for any free one.",
                    port=port,
                ) from error


def clear_socket(path: str) -> None:
    """Remove the socket file of a server that is gone; raise if it is something else.

    Triton leaves its socket file behind and refuses to start where one exists.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        _refuse_missing_folder(path)
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(
            f"{path} exists and is not a socket; it is left alone.",
            hint="Choose another path for the Unix socket.",
            path=path,
        )
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(path) == 0:
            raise ServerStartFailed(
                f"another process listens on the Unix socket {path}.",
                hint="Stop it or choose another path.",
                path=path,
            )
    os.unlink(path)


def _refuse_missing_folder(path: str) -> None:
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise UsageError(
            f"the folder of the Unix socket {path} does not exist.",
            hint=f"Make it first: mkdir -p {folder}",
            path=path,
        )
