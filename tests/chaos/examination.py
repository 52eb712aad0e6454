"""What must hold at a calm point: everything works, and nothing is left of the dead.

Owns the orders to clients that rest, what befalls idle connections and registrations
meanwhile, sessions that close without a server, and the look at what files and
registrations there are. Refuses to excuse anything.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from shmlane import Session
from shmlane.inventory import RegionInfo, list_regions
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
        if all(each.alive for each in self._regions()):
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
            regions = self._regions()
            dead = [each.name for each in regions if not each.alive]
            alive = [each.name for each in regions if each.alive]
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
        files = [each.name for each in self._regions()]
        registered = untold(self._registered(), ())
        if files or registered:
            raise ChaosFailure(
                f"left by clients that ended well: files {files}, registrations"
                f" {registered}"
            )

    def _refuse_untold(self) -> None:
        """Without the file nobody can tell whose a registration is: it would stay."""
        registered = self._registered()
        files = [each.name for each in list_regions()]
        if left := untold(registered, files):
            raise ChaosFailure(
                f"{len(left)} registrations, of which no file tells: {left[:3]}"
            )

    def _regions(self) -> list[RegionInfo]:
        urls = self._playground.urls
        return [info for info in list_regions() if info.server in urls]

    def _registered(self) -> dict[str, str]:
        _, regions = self._playground.server.call("/v2/systemsharedmemory/status")
        return {region["name"]: region["key"] for region in regions}

    def __repr__(self) -> str:
        return f"<Examination of {self._playground!r}>"
