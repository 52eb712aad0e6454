"""Ports of loopback that nobody else is given, also while no server listens on them.

Owns choosing a free port and keeping it from others. Refuses to listen.
"""

from __future__ import annotations

import os
import socket
import sys
import weakref

LOOPBACK = "127.0.0.1"


class HeldPort:
    """A free port, for as long as this lives.

    A server that is to listen on it sets SO_REUSEADDR, as servers do. As long as none
    does, whoever connects is refused; without this, he might reach another program,
    which asked for any free port just then. Only Linux lets a port be held like that:
    elsewhere it was free when this was made.
    """

    def __init__(self) -> None:
        with socket.socket() as holder:
            # Both have to allow it: the server that listens, and who holds the port.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((LOOPBACK, 0))
            self.port: int = holder.getsockname()[1]
            if sys.platform == "linux":
                # Not as a socket: it is held until it is dropped, which is no mistake.
                weakref.finalize(self, os.close, holder.detach())

    def __repr__(self) -> str:
        return f"<HeldPort {self.port}>"
