"""One launch of a tritonserver, from its command line to the first right answer.

Owns what the server is told, the wait for readiness, the error that shows its log, and
the check that Python models get the numbers a client sends, which a short-lived server
beforehand makes so that nobody finds its model among their own. Ends the process on any
failure; refuses to return one that is not ready.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from shmlane.errors import ServerStartFailed
from shmlane.ports import LOOPBACK
from shmlane.server import health
from shmlane.server.cache import cache_root, make_once
from shmlane.server.kept import KeptProcess, Leavings
from shmlane.server.managed import Installation
from shmlane.server.models import check_repository, serves_python

_LOG_TAIL_LINES = 30
_LOG_SHOWN_LINES = 12
_POLL_INTERVAL = 0.02
# A failed start prints pages of tables or options; these lines say what was wrong.
_COMPLAINT = re.compile(
    r"^E\d{4} (?!.*CudaDriver)|^error|^cannot run|already in use|(?-i:UNAVAILABLE)"
    r"|unrecognized option|invalid option|^(invalid|bad) (option|value)"
    r"|^unexpected argument|option format is",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """Everything that decides how a server is started.

    `name` is unique to the server: it is told as its identifier, so that nobody else's
    server on the same address is taken for it, and prefixes its shared memory.
    """

    name: str
    installation: Installation
    repositories: tuple[Path, ...]
    ports: tuple[int, int]
    unix_socket: str | None
    extra_args: tuple[str, ...]
    log: Path
    timeout: float

    @property
    def address(self) -> health.Address:
        """Where this server answers HTTP."""
        return health.Address(self.ports[0], self.unix_socket)

    def run(self) -> KeptProcess:
        """Start the server and return once it is ready, if it computes right."""
        python_models = serves_python(self.repositories)
        if python_models:
            self._ensure_right_data()
        return self._start(python_models)

    def _start(self, python_models: bool) -> KeptProcess:
        log_start = self.log.stat().st_size if self.log.exists() else 0
        process = KeptProcess(
            self._command(python_models),
            environment=self.installation.environment(python_models=python_models),
            log=self.log,
            leavings=Leavings(
                files=(self.unix_socket,) if self.unix_socket else (),
                shm_prefix=self._shm_prefix,
            ),
        )
        try:
            self._wait_until_ready(process, log_start)
        except BaseException:
            process.stop()
            raise
        return process

    @property
    def _shm_prefix(self) -> str:
        return f"{self.name}_"

    def _command(self, python_models: bool) -> list[str]:
        if self.unix_socket:
            http = [f"--http-address=unix:{self.unix_socket}"]
        else:
            http = [f"--http-address={LOOPBACK}", f"--http-port={self.ports[0]}"]
        return [
            str(self.installation.executable),
            f"--id={self.name}",
            *(f"--model-repository={folder}" for folder in self.repositories),
            *http,
            f"--grpc-address={LOOPBACK}",
            f"--grpc-port={self.ports[1]}",
            "--allow-metrics=false",
            # Two servers with the same prefix crash each other.
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
            *self.installation.arguments(python_models=python_models),
            *self.extra_args,
        ]

    def _wait_until_ready(self, process: KeptProcess, log_start: int) -> None:
        deadline = time.monotonic() + self.timeout
        while not self._is_ready():
            if not process.is_alive:
                what = f"ended with exit code {process.exit_code}"
                raise self._failure(what, log_start)
            if time.monotonic() > deadline:
                what = f"was not ready after {self.timeout:.0f} s"
                raise self._failure(what, log_start)
            time.sleep(_POLL_INTERVAL)

    def _is_ready(self) -> bool:
        if not health.is_ready(self.address):
            return False
        renamed = any(argument.startswith("--id") for argument in self.extra_args)
        return renamed or health.server_facts(self.address).get("name") == self.name

    def _ensure_right_data(self) -> None:
        """Check once what is known to stay the same, all else before each start."""
        state = self.installation.python_state()
        if state is None or self._backend_options:
            return self._check_data()
        folder = cache_root() / f"python-backend-checked-{state}"
        make_once(folder, lambda folder: self._check_data())
        return None

    def _check_data(self) -> None:
        with tempfile.TemporaryDirectory(prefix="shmlane-check-") as folder:
            check = dataclasses.replace(
                self,
                name=f"{self.name}-check",
                repositories=(check_repository(),),
                unix_socket=f"{folder}/http.sock",
                extra_args=(*self._backend_options, "--allow-grpc=false"),
                log=self.log.with_name(f"{self.name}-check.log"),
            )
            process = check._start(python_models=True)
            try:
                wrong = health.wrong_echo(check.address)
            finally:
                process.kill()
        if wrong is not None:
            raise ServerStartFailed(
                f"the Python backend of {self.installation.executable} hands models "
                f"wrong data: {wrong}.",
                hint="That is what a backend built for NumPy 1 does under NumPy 2: let "
                "the models' Python have numpy<2.",
                echoed=wrong,
            )
        check.log.unlink(missing_ok=True)

    @property
    def _backend_options(self) -> tuple[str, ...]:
        """The caller's options that may decide what Python models get."""
        return tuple(_backend_options(self.extra_args))

    def _failure(self, what: str, log_start: int) -> ServerStartFailed:
        text = self.log.read_bytes()[log_start:].decode(errors="replace")
        lines = text.rstrip().splitlines()
        complaints = [line for line in lines if _COMPLAINT.search(line)] or lines
        shown = "\n".join(
            f"  {' '.join(line.split())}" for line in complaints[-_LOG_SHOWN_LINES:]
        )
        return ServerStartFailed(
            f"tritonserver {what}. From its log:\n{shown}\n",
            hint=f"The whole log is {self.log}.",
            log="\n".join(lines[-_LOG_TAIL_LINES:]),
        )


def _backend_options(options: Sequence[str]) -> Iterator[str]:
    is_value = False
    for option in options:
        if is_value or option.startswith("--backend-"):
            yield option
        is_value = option.startswith("--backend-") and "=" not in option
