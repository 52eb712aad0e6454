"""A real tritonserver on this machine: start it, know that it is right, end it.

Owns one server process with its addresses, its log and its readiness. Listens on
loopback or a Unix socket only. Refuses to hand out a server whose Python models get
wrong data, and to leave anything behind: no process, socket or shared memory outlives
it, even when the program that started it is killed.
"""

from __future__ import annotations

import re
import secrets
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shmlane.errors import ServerStartFailed, ServerUnreachable, UsageError
from shmlane.ports import LOOPBACK, HeldPort
from shmlane.server.cache import cache_root, make_folder
from shmlane.server.endpoints import (
    checked_port,
    checked_socket_path,
    clear_socket,
    refuse_taken_ports,
)
from shmlane.server.health import Address, call, ready_models
from shmlane.server.kept import KeptProcess
from shmlane.server.launch import Launch
from shmlane.server.logs import drop_old_logs
from shmlane.server.managed import find_installation
from shmlane.server.models import ECHO_MODELS, demo_models

_PORT_TRIES = 5
_PORT_TAKEN = re.compile(
    r"already in use|failed to start (http|grpc) service", re.IGNORECASE
)


class TritonServer:
    """A tritonserver that lives from `start` to `stop`, or as long as a `with` block.

    `model_repository` is one folder or several; without it the demo models `sink` and
    `identity` are served. Port 0 picks a free one, the same over `restart`, which is
    kept from others while the server is away. With `unix_socket` HTTP is served there
    and on no port: Triton has one HTTP address. `extra_args` go to tritonserver as they
    are, after all others.
    """

    def __init__(
        self,
        model_repository: str | Path | Sequence[str | Path] = (),
        *,
        http_port: int = 0,
        grpc_port: int = 0,
        unix_socket: str | Path | None = None,
        extra_args: Sequence[str] = (),
        start_timeout: float = 60.0,
    ) -> None:
        if isinstance(model_repository, str | Path):
            model_repository = [model_repository]
        self._repositories = [Path(folder).absolute() for folder in model_repository]
        self._wanted_ports = (
            checked_port("http_port", http_port),
            checked_port("grpc_port", grpc_port),
        )
        self._ports: tuple[int, int] | None = None
        # Those that it chose: while it does not run, nobody else is given them.
        self._held: list[HeldPort] = []
        self._socket = checked_socket_path(unix_socket) if unix_socket else None
        self._extra_args = _checked_options(extra_args)
        self._start_timeout = start_timeout
        self._name = f"shmlane-{secrets.token_hex(6)}"
        self.log_path = cache_root() / "logs" / f"{self._name}.log"
        self._process: KeptProcess | None = None

    def __repr__(self) -> str:
        if self._process is None or self._ports is None:
            return "<TritonServer not started>"
        if not self.is_alive:
            return f"<TritonServer ended with {self._process.exit_code}>"
        return (
            f"<TritonServer pid {self.pid}, http {self._address}, grpc {self.grpc_url}>"
        )

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def http_url(self) -> str:
        """`127.0.0.1:port` of HTTP."""
        if self._socket is not None:
            raise UsageError(
                f"this server speaks HTTP on {self._socket} and on no port.",
                hint="Use unix_url, or start it without unix_socket.",
            )
        return f"{LOOPBACK}:{self._known_ports()[0]}"

    @property
    def grpc_url(self) -> str:
        """`127.0.0.1:port` of gRPC."""
        return f"{LOOPBACK}:{self._known_ports()[1]}"

    @property
    def unix_url(self) -> str:
        """`unix:///path` of HTTP on the Unix socket."""
        if self._socket is None:
            raise UsageError(
                "this server has no Unix socket.",
                hint="Use http_url, or start it with unix_socket=PATH.",
            )
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int:
        """Process id of tritonserver itself."""
        if self._process is None:
            raise UsageError("this server was never started.", hint="Call start().")
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs; always False in a forked child."""
        return self._process is not None and self._process.is_alive

    @property
    def exit_code(self) -> int | None:
        """How it ended, 128 + n after signal n; None while it runs or never did."""
        return None if self._process is None else self._process.exit_code

    @property
    def version(self) -> str:
        """Triton's version as the running server tells it, such as `2.51.0`."""
        return str(self.call("/v2")[1]["version"])

    def call(self, path: str, body: object = None) -> tuple[int, Any]:
        """GET a path, or POST `body` to it as JSON; the status and the JSON reply."""
        reply = call(self._address, path, body)
        if reply is None:
            raise ServerUnreachable(
                f"{self!r} does not answer {path}.",
                hint=f"Its log is {self.log_path}.",
            )
        return reply

    def model_names(self) -> list[str]:
        """Names of the models that the running server has ready."""
        return ready_models(self._address)

    def log_text(self) -> str:
        """All that the server has printed so far, over restarts."""
        try:
            return self.log_path.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def start(self) -> None:
        """Start, and return once every model is ready."""
        if self.is_alive:
            raise UsageError(f"{self!r} is running.", hint="Use restart().")
        if not self._repositories:
            self._repositories = demo_models(*ECHO_MODELS)
        for folder in self._repositories:
            self._check_repository(folder)
        ports = self._ports or self._wanted_ports
        if 0 in ports:
            self._launch_on_free_ports()
        else:
            self._launch(ports)

    def stop(self) -> None:
        """End the server in order and wait until all of it is gone. Harmless twice."""
        if self._process is not None:
            self._process.stop()

    def restart(self) -> None:
        """Stop and start again on the same addresses; clients lose their regions."""
        self.stop()
        self.start()

    def kill(self) -> None:
        """End the server as a crash would (SIGKILL) and wait until it is gone."""
        if self._process is not None:
            self._process.kill()

    def _check_repository(self, folder: Path) -> None:
        if not folder.is_dir():
            problem = "is not a folder"
        # A server that is told when to load may have its models put there later.
        elif _loads_at_start(self._extra_args) and not _has_folders(folder):
            problem = "has no models in it"
        else:
            return
        raise UsageError(
            f"the model repository {folder} {problem}.",
            hint="Give the folder that holds the models' folders.",
            path=str(folder),
        )

    def _launch_on_free_ports(self) -> None:
        for tries_left in reversed(range(_PORT_TRIES)):
            self._held = held = [HeldPort(), HeldPort()]
            http, grpc = (
                wanted or free.port
                for wanted, free in zip(self._wanted_ports, held, strict=True)
            )
            try:
                return self._launch((http, grpc))
            except ServerStartFailed as error:
                # Held is not taken: a program that wants this very port may have it.
                taken = _PORT_TAKEN.search(str(error))
                if not (taken and tries_left):
                    raise
        return None

    def _launch(self, ports: tuple[int, int]) -> None:
        if self._socket is not None:
            clear_socket(self._socket)
        refuse_taken_ports(ports[1:] if self._socket else ports)
        make_folder(self.log_path.parent)
        drop_old_logs(self.log_path.parent)
        launch = Launch(
            name=self._name,
            installation=find_installation(),
            repositories=tuple(self._repositories),
            ports=ports,
            unix_socket=self._socket,
            extra_args=self._extra_args,
            log=self.log_path,
            timeout=self._start_timeout,
        )
        process = launch.run()
        self._process, self._ports = process, ports
        # A server that was forgotten ends with its handle, at the latest on exit.
        weakref.finalize(self, process.kill)

    @property
    def _address(self) -> Address:
        return Address(self._known_ports()[0], self._socket)

    def _known_ports(self) -> tuple[int, int]:
        if self._ports is None:
            raise UsageError(
                "this server has no address before it is started.", hint="Call start()."
            )
        return self._ports


def _checked_options(options: object) -> tuple[str, ...]:
    """A text alone would be taken for a list of its letters."""
    if isinstance(options, Sequence) and not isinstance(options, str | bytes):
        given = tuple(options)
        if all(isinstance(each, str) for each in given):
            return given
    raise UsageError(
        f"extra_args={options!r} is not a list of texts.",
        hint='Give a list, as in extra_args=["--log-verbose=1"].',
    )


def _loads_at_start(options: Sequence[str]) -> bool:
    return not any(option.startswith("--model-control-mode") for option in options)


def _has_folders(folder: Path) -> bool:
    return any(entry.is_dir() for entry in folder.iterdir())
