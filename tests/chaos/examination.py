"""What must hold at a calm point: everything works, and nothing is left of the dead.

Owns the orders to clients that rest, what befalls idle connections and registrations
meanwhile, sessions that close without a server, and the look at what files and
registrations there are. Refuses to excuse anything.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Mapping

from shmlane import Session
from shmlane.errors import RegionError
from shmlane.header import RegionHeader
from shmlane.regions import owner_is_dead, region_files
from tests.chaos.faults import Playground
from tests.chaos.handle import ChaosFailure
from tests.chaos.machine import Usage

_OURS = "shmlane."
_CLEAN_WITHIN = 10.0
_LOOK = 0.05


def untold(registered: Mapping[str, str], files: Collection[str]) -> list[str]:
    """Registrations of ours, keys by name, of which none of these files tells."""
    return [
        name
        for name, key in registered.items()
        if name.startswith(_OURS) and key.lstrip("/") not in files
    ]


class Examination:
    """Looks at one playground whose faults have all been put right."""

    def __init__(self, playground: Playground) -> None:
        self._playground = playground

    def come_to_rest(self) -> list[Usage]:
        """What each client uses once all its slots are free, and all have been used."""
        used = self._order("calm")
        self._playground.check_bystander()
        self._refuse_untold()
        self.clean()
        return used

    # --- what must not matter ---------------------------------------------------------

    def spoil_connections(self) -> None:
        """Idle connections end or have something to read: no call may notice."""
        if not self._playground.between.spoil():
            raise ChaosFailure("every slot was used, and no connection is there")
        self._order("use")

    def restart_server(self) -> None:
        self._playground.restart_server()
        self._order("use")

    def wipe_regions(self) -> None:
        self._playground.cause("regions wiped by a stranger")
        self._order("use")

    def close_without_server(self) -> None:
        """Whoever leaves now cannot unregister: files must tell who it was."""
        playground = self._playground
        self._order("visit")
        playground.halt_server()
        try:
            self._order("leave")
        finally:
            playground.continue_server()
        self._refuse_untold()
        if all(self._files().values()):
            raise ChaosFailure("sessions closed without a server, and left no file")
        self.clean()

    def _order(self, word: str) -> list[Usage]:
        clients = self._playground.clients
        for client in clients:
            client.order(word)
        used = [client.await_done(word) for client in clients]
        self._playground.check()
        return used

    # --- what is left -----------------------------------------------------------------

    def clean(self) -> None:
        """The next session removes what the dead left, here and on the server."""
        deadline = time.monotonic() + _CLEAN_WITHIN
        while True:
            for url in self._playground.urls:
                Session(url, "identity").open().close()
            files = self._files()
            dead = [name for name, is_used in files.items() if not is_used]
            alive = [name for name, is_used in files.items() if is_used]
            left = untold(self._registered(), alive)
            if not dead and not left:
                return
            # A request of the dead may still be running.
            if time.monotonic() > deadline:
                raise ChaosFailure(
                    f"left by the dead and not cleaned up: files {dead},"
                    f" registrations {left}"
                )
            time.sleep(_LOOK)

    def refuse_all(self) -> None:
        """All clients ended well and with the server there: nothing is left of them."""
        files = list(self._files())
        registered = untold(self._registered(), ())
        if files or registered:
            raise ChaosFailure(
                f"left by clients that ended well: files {files}, registrations"
                f" {registered}"
            )

    def _refuse_untold(self) -> None:
        """Without the file nobody can tell whose a registration is: it would stay."""
        registered = self._registered()
        files = [os.path.basename(path) for path in region_files()]
        if left := untold(registered, files):
            raise ChaosFailure(
                f"{len(left)} registrations, of which no file tells: {left[:3]}"
            )

    def _files(self) -> dict[str, bool]:
        """Whether somebody uses it, of each region file that names our server.

        To ask takes a file from its users for a moment, so others' are left alone.
        """
        used = {}
        for path in region_files():
            with contextlib.suppress(FileNotFoundError, RegionError):
                with open(path, "rb") as file:
                    header = RegionHeader.parse(file.read())
                if header.description["server"] in self._playground.urls:
                    with owner_is_dead(path) as is_dead:
                        used[os.path.basename(path)] = not is_dead
        return used

    def _registered(self) -> dict[str, str]:
        _, regions = self._playground.server.call("/v2/systemsharedmemory/status")
        return {region["name"]: region["key"] for region in regions}

    def __repr__(self) -> str:
        return f"<Examination of {self._playground!r}>"
