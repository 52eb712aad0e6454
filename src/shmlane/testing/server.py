"""A server in this process that answers like a Triton of a chosen version.

Owns starting, ending, restarting and scripting it, and what tests look at. Refuses to
be fast, to speak gRPC, and to compress.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ..errors import RegionError, ServerError, UsageError
from ..room import SHM_DIRECTORY
from .api import Api
from .dialect import Dialect
from .faults import Delay, Fault
from .http import Reply, Request
from .listener import Address, Listener
from .memory import RegionTable, RegisteredRegion
from .models import FakeModel
from .script import FaultQueue, Stage
from .serving import Conversation

RESTRICTED_APIS = ("shared-memory", "inference")


@dataclass(frozen=True, slots=True)
class _Options:
    """What a server is started with, every time."""

    models: tuple[FakeModel, ...]
    dialect: Dialect
    allow_client_shm: bool
    restricted: tuple[str, str] | None
    restricted_apis: tuple[str, ...]
    shm_directory: str


class _Life:
    """One process of the server: what it knows is gone with it.

    note: called with each request as it comes. report: called with the reason when
    something is done that ends such a Triton.
    """

    def __init__(
        self,
        options: _Options,
        listening: socket.socket,
        *,
        stage: Stage,
        note: Callable[[Request], Fault | None],
        report: Callable[[str], None],
    ) -> None:
        self._ended = threading.Event()
        self._stage = stage
        self._note = note
        self._report = report
        self.regions = RegionTable(
            options.dialect,
            directory=options.shm_directory,
            allows_clients=options.allow_client_shm,
            report=report,
        )
        self._api = Api(
            options.models,
            dialect=options.dialect,
            regions=self.regions,
            stage=stage,
            ended=self._ended,
            restricted=options.restricted,
            restricted_apis=options.restricted_apis,
        )
        self._listener = Listener(listening, self._serve)

    def end(self) -> None:
        """Break off everything; requests inside the model end without a trace."""
        self._ended.set()
        self._stage.wake()
        self._listener.end()

    def join(self) -> None:
        self._listener.join()

    def _serve(self, connected: socket.socket) -> None:
        if connected.family == socket.AF_INET:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        Conversation(connected, answer=self._answer, take_fault=self._note).run()

    def _answer(self, request: Request, delay: Delay | None) -> Reply | None:
        try:
            return self._api.answer(request, delay)
        except RegionError as error:
            self._report(error.message)
            self.end()
            return None


class ScriptedServer:
    """A fake Triton for tests: real sockets, real shared memory, no tritonserver.

        with ScriptedServer([identity_model()]) as server:
            with Session(server.url, "identity") as session:
                ...

    It maps the clients' files, reads inputs and writes outputs in place, and answers
    with the statuses and texts of `version`, so that what works here works there, and
    stale data shows.

    models: what it serves; each has a name of its own.
    version: of the Triton that it answers like.
    unix_socket: listen on this path; else on a free port of loopback.
    allow_client_shm: as `--allow-client-shm`; None is the version's default, which is
        off since 2.68.
    restricted_header: name and value of the header without which the
        `restricted_apis` (named as in `--http-restricted-api`) answer 403.
    shm_directory: where it looks for clients' files. An empty folder stands for a
        server in a container of its own, which sees no file of this machine.

    Construction does nothing; `start` or `with` does. Every method may be called from
    any thread.
    """

    def __init__(
        self,
        models: Iterable[FakeModel],
        *,
        version: str = "2.51.0",
        unix_socket: str | os.PathLike[str] | None = None,
        allow_client_shm: bool | None = None,
        restricted_header: tuple[str, str] | None = None,
        restricted_apis: Iterable[str] = RESTRICTED_APIS,
        shm_directory: str | os.PathLike[str] = SHM_DIRECTORY,
    ) -> None:
        dialect = Dialect.of(version)
        if allow_client_shm is None:
            allow_client_shm = not dialect.disables_client_shm
        self._options = _Options(
            _checked_models(models),
            dialect,
            allow_client_shm,
            restricted_header,
            tuple(restricted_apis),
            os.fspath(shm_directory),
        )
        self._check(self._options)
        self._address = Address(unix_socket)
        self._starting = threading.Lock()
        self._life: _Life | None = None
        self._stage = Stage()
        self._faults = FaultQueue()
        self._requests: list[Request] = []
        self._crashes: list[str] = []

    @staticmethod
    def _check(options: _Options) -> None:
        names = Counter(model.name for model in options.models)
        if twice := [name for name, count in names.items() if count > 1]:
            raise UsageError(
                f"two fake models are named {twice[0]!r}.",
                hint="Give each a name of its own: identity_model('other').",
                name=twice[0],
            )
        if options.restricted and not options.dialect.restricts_apis:
            raise UsageError(
                f"Triton {options.dialect.version} cannot restrict APIs; 2.40 and later"
                " can."
            )

    @property
    def version(self) -> str:
        """Of the Triton that this answers like."""
        return self._options.dialect.version

    # --- starting and ending ----------------------------------------------------------

    def start(self) -> None:
        """Listen. Starting twice does nothing; after `stop` the address is the same."""
        with self._starting:
            if self._life is None:
                self._life = _Life(
                    self._options,
                    self._address.listen(),
                    stage=self._stage,
                    note=self._note,
                    report=self._crashes.append,
                )

    def stop(self) -> None:
        """End as a killed server does, and wait for all threads.

        Connections break, requests inside the model end without writing anything and
        every registration is forgotten. A function of a `FakeModel` that is running
        is waited for. Stopping twice does nothing.
        """
        with self._starting:
            life, self._life = self._life, None
        if life is not None:
            life.end()
            life.join()

    def restart(self) -> None:
        """`stop`, then `start` on the same address."""
        self.stop()
        self.start()

    def __enter__(self) -> ScriptedServer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    # --- looking ----------------------------------------------------------------------

    @property
    def url(self) -> str:
        """What `Session` takes; valid from the first start on."""
        return self._address.url

    @property
    def requests(self) -> tuple[Request, ...]:
        """Every request that has come, also to earlier starts, in order."""
        return tuple(self._requests)

    @property
    def regions(self) -> Mapping[str, RegisteredRegion]:
        """What is registered now, by name."""
        life = self._life
        known = [] if life is None else life.regions.status()
        return {region.name: region for region in known}

    @property
    def leaked_descriptors(self) -> int:
        """Descriptors that refused registrations leaked since the last start.

        Every version so far leaks one where the size does not fit the file.
        """
        life = self._life
        return 0 if life is None else life.regions.leaked_descriptors

    @property
    def in_model(self) -> int:
        """Requests that are inside a model now, held or running."""
        return self._stage.inside

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Scripted faults that no request has taken yet."""
        return self._faults.waiting

    @property
    def crashed(self) -> bool:
        """Whether anything was done that ends a Triton of this version.

        That is unregistering a region in use before 2.50, and making the server touch
        memory that is not there, such as the end of a shrunk file. At the touch this
        server ends too; `restart` brings it back.
        """
        return bool(self._crashes)

    @property
    def crash_reasons(self) -> tuple[str, ...]:
        """What was done, in words."""
        return tuple(self._crashes)

    # --- scripting --------------------------------------------------------------------

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """From now on requests wait inside the model, their regions in use.

        Until `release`, or the end of the `with` block if used as one. The model has
        read nothing and written nothing by then.
        """
        self._stage.hold()
        return self._until_released()

    def release(self) -> None:
        """Let the requests that wait inside the model run, and all that come."""
        self._stage.release()

    @contextlib.contextmanager
    def _until_released(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.release()

    def wait_for(self, count: int = 1, *, timeout: float = 10.0) -> None:
        """Return once `count` requests are inside the model; else `TimeoutError`."""
        if not self._stage.wait_for(count, timeout):
            raise TimeoutError(
                f"no {count} requests were inside the model within {timeout:g} s, but"
                f" {self.in_model}; {len(self._requests)} came since the first start."
            )

    def script(self, *faults: Fault, path: str | None = None) -> None:
        """Let the next inferences go wrong, one fault each, in this order.

        path: not inferences but requests whose path contains this take them, as in
        `server.script(Status(503), path="/register")`.
        """
        self._faults.add(faults, path)

    def unregister_all(self) -> None:
        """What any other client may do: unregister everybody's system memory."""
        life = self._life
        if life is not None:
            # From 2.50 to 2.52 regions in use stay.
            with contextlib.suppress(ServerError):
                life.regions.unregister_all()

    def _note(self, request: Request) -> Fault | None:
        self._requests.append(request)
        return self._faults.take(request)

    def __repr__(self) -> str:
        if self._life is None:
            return f"<ScriptedServer {self.version} not running>"
        held = ", held" if self._stage.is_held else ""
        return (
            f"<ScriptedServer {self.version} at {self.url}, {len(self.regions)}"
            f" regions, {self.in_model} requests in the model{held}>"
        )


def _checked_models(models: object) -> tuple[FakeModel, ...]:
    hint = "Give a list of fake models: ScriptedServer([identity_model()])."
    if isinstance(models, FakeModel | str) or not isinstance(models, Iterable):
        raise UsageError(f"models={models!r} is not a list of models.", hint=hint)
    given = tuple(models)
    for each in given:
        if not isinstance(each, FakeModel):
            raise UsageError(f"{each!r} is not a fake model.", hint=hint)
    return given
