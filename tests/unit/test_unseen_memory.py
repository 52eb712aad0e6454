"""Servers that do not see or take our memory: told at once, and after a restart."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmlane import (
    AccessRestricted,
    RegionNotVisible,
    ServerError,
    SharedMemoryDisabled,
    ShmlaneError,
)
from shmlane.regions import PAGE_BYTES, PREFIX
from shmlane.testing import ScriptedServer, Status, identity_model
from tests.sessions import region_files
from tests.unit.one_slot import echo, one_slot, serves_right, serving, state


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as server:
        yield server


@pytest.mark.parametrize("version", ["2.45.0", "2.51.0", "2.60.0", "2.70.0"])
def test_a_smaller_file_in_the_place_of_ours_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    name = secrets.token_hex(8)
    (tmp_path / f"{PREFIX}{name}").write_bytes(bytes(PAGE_BYTES))
    monkeypatch.setattr(secrets, "token_hex", lambda _count: name)
    server = ScriptedServer(
        [identity_model()],
        version=version,
        allow_client_shm=True,
        shm_directory=tmp_path,
    )
    with server:
        with pytest.raises(RegionNotVisible, match="has a smaller file") as caught:
            one_slot(server.url).open()
        assert "mount the same /dev/shm" in caught.value.hint
        assert server.regions == {}
        # Each such refusal costs the server a descriptor: it is not asked for again.
        assert server.leaked_descriptors == 1
    assert Path("/dev/shm", f"{PREFIX}{name}") not in region_files()


REFUSALS: list[tuple[int, str, type[ShmlaneError], str]] = [
    (
        501,
        "Client shared memory is disabled. Start the server with"
        " '--allow-client-shm=true' to enable.",
        SharedMemoryDisabled,
        "--allow-client-shm=true",
    ),
    (
        403,
        "This API is restricted, expecting header 'x-key'",
        AccessRestricted,
        "Connection(headers=",
    ),
    (
        500,
        "Unable to open shared memory region: '/shmlane.x'",
        RegionNotVisible,
        "--ipc=host",
    ),
    (
        400,
        "failed to register shared memory region 'shmlane.x': invalid args",
        RegionNotVisible,
        "--ipc=host",
    ),
    (500, "Cannot allocate memory", ServerError, ""),
]


@pytest.mark.parametrize(("status", "text", "kind", "hint"), REFUSALS)
def test_a_server_that_refuses_memory_after_a_restart_loses_no_slot(
    server: ScriptedServer,
    status: int,
    text: str,
    kind: type[ShmlaneError],
    hint: str,
) -> None:
    with one_slot(server.url) as session:
        echo(session, 1.0)
        server.restart()
        refusal = Status(status, f'{{"error":"{text}"}}', model_runs=False)
        server.script(refusal, refusal, path="/register")
        for _ in range(2):
            with pytest.raises(kind) as caught:
                echo(session, 2.0)
            assert hint in caught.value.hint
            assert state(session) == "free"
        serves_right(session)


def test_a_server_that_forgets_each_registration_is_given_up(
    server: ScriptedServer,
) -> None:
    forgets = Status(
        404, '{"error":"Unable to find shared memory region: \'r\'"}', model_runs=False
    )
    with one_slot(server.url) as session:
        echo(session, 1.0)
        before = session.stats()
        server.script(*[forgets] * 5)
        with pytest.raises(ShmlaneError, match="gave up after 5 tries") as caught:
            echo(session, 2.0)
        assert caught.value.retryable
        after = session.stats()
        assert after.retries - before.retries == 5
        assert after.registrations - before.registrations == 4
        assert state(session) == "free"
        serves_right(session)
