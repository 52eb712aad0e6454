"""The demo models: right values, in C and in Python, on the wire and in place."""

from __future__ import annotations

import concurrent.futures
import contextlib
import mmap
import os
import secrets
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from shmlane.errors import UsageError
from shmlane.server import TritonServer, demo_models
from tests.polling import eventually

SHM = Path("/dev/shm")
MODELS = ("sink", "identity")


@pytest.fixture(scope="module")
def python_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server with the demo models as they are made where no compiler is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHMLANE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("PATH", "/nowhere")
        repositories = demo_models(*MODELS)
    with TritonServer(repositories) as server:
        yield server


@pytest.fixture(params=["in C", "in Python"])
def either(request: pytest.FixtureRequest) -> TritonServer:
    """Each way in which the demo models can be served, in turn."""
    name = "server" if request.param == "in C" else "python_server"
    server: TritonServer = request.getfixturevalue(name)
    return server


def ask(
    server: TritonServer, model: str, values: Sequence[float], **parameters: object
) -> tuple[int, Any]:
    tensor = {
        "name": "INPUT__0",
        "shape": [1, 1, 1, len(values)],
        "datatype": "FP32",
        "data": list(values),
    }
    body = {"inputs": [tensor], "parameters": parameters}
    return server.call(f"/v2/models/{model}/infer", body)


def answer(server: TritonServer, model: str, values: Sequence[float]) -> list[float]:
    status, reply = ask(server, model, values)
    assert status == 200, reply
    data: list[float] = reply["outputs"][0]["data"]
    return data


def test_sink_answers_with_the_last_element(either: TritonServer) -> None:
    assert answer(either, "sink", [1.5, -2.0, 7.25]) == [7.25]


def test_identity_answers_with_all_of_it(either: TritonServer) -> None:
    assert answer(either, "identity", [1.5, -2.0, 7.25]) == [1.5, -2.0, 7.25]


def test_only_the_demo_models_are_listed(either: TritonServer) -> None:
    assert either.model_names() == ["identity", "sink"]


def test_requests_at_once_keep_their_own_values(either: TritonServer) -> None:
    sent = [[float(i), float(i + 1)] for i in range(64)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda values: answer(either, "identity", values), sent))
    assert got == sent


def test_sink_refuses_a_tensor_without_elements(either: TritonServer) -> None:
    status, reply = ask(either, "sink", [])
    assert status == 400
    assert "at least one element" in reply["error"]
    assert answer(either, "sink", [3.0]) == [3.0]


def test_identity_echoes_a_tensor_without_elements(either: TritonServer) -> None:
    assert answer(either, "identity", []) == []


@pytest.mark.parametrize("model", MODELS)
def test_a_reply_can_be_held_back(either: TritonServer, model: str) -> None:
    started = time.monotonic()
    status, _ = ask(either, model, [1.0], delay_ms=80)
    assert status == 200
    assert time.monotonic() - started >= 0.08


@pytest.mark.parametrize("delay_ms", [-1, 60001])
def test_a_delay_out_of_bounds_is_refused(either: TritonServer, delay_ms: int) -> None:
    status, reply = ask(either, "sink", [1.0], delay_ms=delay_ms)
    assert status == 400
    assert "delay_ms must be 0 to 60000" in reply["error"]


def test_held_replies_do_not_hold_back_others(server: TritonServer) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        held = pool.submit(ask, server, "identity", [1.0], delay_ms=1000)
        answers = 0
        while not held.done():
            assert answer(server, "identity", [2.0]) == [2.0]
            answers += 1
        assert held.result()[0] == 200
    assert answers > 2


def test_the_server_counts_answers_and_refusals(server: TritonServer) -> None:
    def counts() -> tuple[int, int]:
        stats = server.call("/v2/models/sink/stats")[1]["model_stats"][0]
        parts = stats["inference_stats"]
        return parts["success"]["count"], parts["fail"]["count"]

    answered, refused = counts()
    answer(server, "sink", [1.0])
    ask(server, "sink", [])
    eventually(lambda: counts() == (answered + 1, refused + 1), "one more of each")


@contextlib.contextmanager
def registered(server: TritonServer, size: int) -> Iterator[tuple[str, mmap.mmap]]:
    """A file in shared memory that the server knows by its own name."""
    # Not named as regions are: whoever cleans up would find one without an owner.
    name = f"shmlane-test-{secrets.token_hex(4)}"
    descriptor = os.open(SHM / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.truncate(descriptor, size)
        path = f"/v2/systemsharedmemory/region/{name}"
        region = {"key": f"/{name}", "offset": 0, "byte_size": size}
        assert server.call(f"{path}/register", region)[0] == 200
        with mmap.mmap(descriptor, size) as memory:
            yield name, memory
        assert server.call(f"{path}/unregister", {})[0] == 200
    finally:
        os.close(descriptor)
        (SHM / name).unlink()


def placed(name: str, region: str, offset: int, size: int) -> dict[str, object]:
    parameters = {
        "shared_memory_region": region,
        "shared_memory_offset": offset,
        "shared_memory_byte_size": size,
    }
    return {"name": name, "parameters": parameters}


@pytest.mark.usefixtures("no_leftovers")
@pytest.mark.parametrize(
    ("model", "expected"), [("sink", [3]), ("identity", [1, 2, 3])]
)
def test_models_read_and_write_shared_memory(
    either: TritonServer, model: str, expected: list[float]
) -> None:
    with registered(either, 4096) as (region, memory):
        struct.pack_into("3f", memory, 64, 1.0, 2.0, 3.0)
        given = placed("INPUT__0", region, 64, 12)
        given |= {"datatype": "FP32", "shape": [1, 1, 1, 3]}
        wanted = placed("OUTPUT__0", region, 1024, 4 * len(expected))
        body = {"inputs": [given], "outputs": [wanted]}
        assert either.call(f"/v2/models/{model}/infer", body)[0] == 200
        got = struct.unpack_from(f"{len(expected)}f", memory, 1024)
    assert list(got) == expected


def test_input_and_output_may_be_the_same_memory(server: TritonServer) -> None:
    with registered(server, 4096) as (region, memory):
        struct.pack_into("3f", memory, 0, 1.0, 2.0, 3.0)
        given = placed("INPUT__0", region, 0, 12)
        given |= {"datatype": "FP32", "shape": [1, 1, 1, 3]}
        body = {"inputs": [given], "outputs": [placed("OUTPUT__0", region, 4, 12)]}
        assert server.call("/v2/models/identity/infer", body)[0] == 200
        assert struct.unpack_from("3f", memory, 4) == (1.0, 2.0, 3.0)


def test_making_models_again_returns_the_same_folders() -> None:
    assert demo_models(*MODELS) == demo_models(*MODELS)
    assert len(demo_models("sink", "sink")) == 1


def test_an_unknown_demo_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="sink, identity, resnet50, ocr_det"):
        demo_models("sink", "yolo")


def test_without_a_compiler_the_models_are_python_ones_with_a_notice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SHMLANE_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    (repository,) = demo_models("sink")
    assert (repository / "sink" / "1" / "model.py").exists()
    notice = capsys.readouterr().err
    assert "no C compiler is on PATH" in notice
    assert "slower" in notice


def test_a_compiler_that_fails_is_named_in_the_notice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'no such header' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("SHMLANE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    (repository,) = demo_models("identity")
    assert (repository / "identity" / "1" / "model.py").exists()
    assert f"{compiler} cannot build" in (notice := capsys.readouterr().err)
    assert "no such header" in notice
