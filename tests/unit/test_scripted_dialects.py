"""What differs between versions of Triton, asked of the scripted server by hand."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmlane.testing import (
    FakeModel,
    ScriptedServer,
    identity_model,
)
from tests.polling import eventually
from tests.raw_http import (
    RawConnection,
    RawReply,
    ask,
    get,
    infer,
    output,
    place,
    register,
    request,
    status,
    tensor,
    unregister,
)
from tests.sessions import Array

SIZE = 16384
IN = tensor(place("r", 64))
OUT = output(place("r", 64, 4096))
UNREGISTER_ALL = request("POST", "/v2/systemsharedmemory/unregister")


class File:
    """A file in /dev/shm whose numbers count from 0."""

    def __init__(self) -> None:
        self.path = Path("/dev/shm") / f"scripted-test.{secrets.token_hex(8)}"
        self.path.write_bytes(np.arange(SIZE // 4, dtype=np.float32).tobytes())
        self.key = f"/{self.path.name}"

    def numbers(self, offset: int, count: int = 16) -> list[float]:
        numbers: list[float] = np.fromfile(
            self.path, np.float32, count, offset=offset
        ).tolist()
        return numbers

    def shrink(self, nbytes: int) -> None:
        with self.path.open("r+b") as file:
            file.truncate(nbytes)


@pytest.fixture
def file() -> Iterator[File]:
    file = File()
    yield file
    file.path.unlink()


@contextlib.contextmanager
def triton(version: str) -> Iterator[ScriptedServer]:
    """A server of that version that accepts shared memory and ends its threads."""
    before = threading.active_count()
    server = ScriptedServer([identity_model()], version=version, allow_client_shm=True)
    with server:
        yield server
    assert threading.active_count() <= before


def known(server: ScriptedServer, file: File) -> ScriptedServer:
    """The server, with the whole file registered as r."""
    reply = ask(server.url, register("r", key=file.key, byte_size=SIZE))
    assert reply.status == 200
    return server


def both(reply: RawReply) -> tuple[int, str]:
    return reply.status, reply.error if reply.body else ""


# --- registering ----------------------------------------------------------------------

CLOSED = "unable to process address spaceBad file descriptor"


@pytest.mark.parametrize(
    ("version", "answer"),
    [
        ("2.44.0", (400, f"failed to register shared memory region 's': {CLOSED}")),
        ("2.45.0", (500, "Invalid shared memory region: 'KEY'")),
        ("2.68.0", (500, "Invalid shared memory region: 'KEY'")),
        ("2.69.0", (200, "")),
    ],
)
def test_key_is_registered_a_second_time(
    file: File, version: str, answer: tuple[int, str]
) -> None:
    with triton(version) as server:
        known(server, file)
        came = both(ask(server.url, register("s", key=file.key, byte_size=SIZE)))
        assert came == (answer[0], answer[1].replace("KEY", file.key))
        slashes = register("t", key=f"/{file.key}", byte_size=SIZE)
        assert ask(server.url, slashes).status == 200


@pytest.mark.parametrize(("version", "status_code"), [("2.44.0", 200), ("2.45.0", 400)])
def test_size_is_checked_against_the_file_since_2_45(
    file: File, version: str, status_code: int
) -> None:
    with triton(version) as server:
        for name in "ab":
            reply = ask(server.url, register(name, key=f"{name}/..", byte_size=SIZE))
            assert reply.error == f"Unable to open shared memory region: '{name}/..'"
        reply = ask(server.url, register("r", key=file.key, byte_size=SIZE + 1))
        assert reply.status == status_code
        assert server.leaked_descriptors == (status_code == 400)
        assert len(server.regions) == (status_code == 200)


@pytest.mark.parametrize(
    ("version", "spelled", "refused"),
    [
        ("2.59.0", "/KEY", False),
        ("2.59.0", "KEY", False),
        ("2.59.1", "KEY", True),
        ("2.59.1", "/KEY", False),
        ("2.60.0", "//KEY", True),
    ],
)
def test_keys_of_the_python_backend_are_reserved_since_2_59_1(
    version: str, spelled: str, refused: bool
) -> None:
    prefix = "triton_python_backend_shm_region_"
    key = spelled.replace("KEY", f"{prefix}x")
    with triton(version) as server:
        reply = ask(server.url, register("r", key=key, byte_size=SIZE))
    expected = (500, f"Unable to open shared memory region: '{key}'")
    if refused:
        expected = (
            400,
            f"cannot register shared memory region 'r' with key '{key}' as the key"
            f" contains the reserved prefix '{prefix}'",
        )
    assert both(reply) == expected


@pytest.mark.parametrize(
    ("version", "answer"),
    [
        ("2.59.1", (500, "Unable to open shared memory region: '//'")),
        (
            "2.60.0",
            (400, "cannot register shared memory region 'r' - invalid shm key '//'"),
        ),
    ],
)
def test_key_of_slashes_only(version: str, answer: tuple[int, str]) -> None:
    with triton(version) as server:
        assert both(ask(server.url, register("r", key="//", byte_size=64))) == answer


def test_disabled_memory_has_an_empty_status_and_no_regions(file: File) -> None:
    with ScriptedServer([identity_model()], version="2.68.0") as server:
        disabled = (
            501,
            "Client shared memory is disabled. Start the server with"
            " '--allow-client-shm=true' to enable.",
        )
        for refused in (
            register("r", key=file.key, byte_size=SIZE),
            unregister("r"),
            UNREGISTER_ALL,
        ):
            assert both(ask(server.url, refused)) == disabled
        assert ask(server.url, get("/v2/systemsharedmemory/status")).json() == []
        assert ask(server.url, infer([IN])).status == 404


# --- inference ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "block", "answer"),
    [
        ("2.43.0", (64, SIZE), None),
        ("2.44.0", (64, SIZE), "Invalid offset for shared memory region: 'r'"),
        ("2.44.0", (64, SIZE - 32), None),
        (
            "2.45.0",
            (64, SIZE - 32),
            "Invalid offset + byte size for shared memory region: 'r'",
        ),
    ],
)
def test_block_outside_the_region_ends_old_servers(
    file: File, version: str, block: tuple[int, int], answer: str | None
) -> None:
    with triton(version) as server, RawConnection(known(server, file).url) as client:
        client.send(infer([tensor(place("r", *block))]))
        reply = client.read()
        assert (reply and both(reply)) == (answer and (400, answer))
        assert server.crashed == (answer is None)
        assert client.is_alive() == (answer is not None)


@pytest.mark.parametrize(("version", "status_code"), [("2.46.0", 200), ("2.47.0", 400)])
def test_input_larger_than_its_shape_is_refused_since_2_47(
    file: File, version: str, status_code: int
) -> None:
    with triton(version) as server:
        reply = ask(known(server, file).url, infer([tensor(place("r", 128))]))
        assert reply.status == status_code


@pytest.mark.parametrize(("version", "status_code"), [("2.59.1", 400), ("2.60.0", 200)])
def test_empty_tensor_may_lie_in_a_region_since_2_60(
    file: File, version: str, status_code: int
) -> None:
    empty = tensor(place("r", 0), shape=(1, 1, 1, 0))
    with triton(version) as server:
        reply = ask(known(server, file).url, infer([empty], [output(place("r", 0))]))
        assert reply.status == status_code


@pytest.mark.parametrize(
    ("version", "beginning"),
    [
        ("2.57.0", "[request id: 7] input byte size mismatch"),
        ("2.58.0", "Integer overflow detected: byte_size (18446744073709551611) +"),
    ],
)
def test_sum_of_65_bits_is_found_since_2_58(
    file: File, version: str, beginning: str
) -> None:
    wraps = tensor(place("r", (1 << 64) - 5, 10))
    with triton(version) as server:
        reply = ask(known(server, file).url, infer([wraps]))
        assert reply.status == 400
        assert reply.error.startswith(beginning)


@pytest.mark.parametrize(("version", "first"), [("2.59.1", 2048.0), ("2.60.0", 1024.0)])
def test_offset_of_a_registration_counts_twice_before_2_60(
    file: File, version: str, first: float
) -> None:
    whole = register("o", key=file.key, byte_size=12288, offset=4096)
    with triton(version) as server:
        assert ask(server.url, whole).status == 200
        reply = ask(server.url, infer([tensor(place("o", 64))]))
        assert reply.json()["outputs"][0]["data"][0] == first


def test_offset_that_counts_twice_leaves_a_small_region_behind(file: File) -> None:
    page = register("o", key=file.key, byte_size=4096, offset=8192)
    with triton("2.59.1") as server, RawConnection(server.url) as client:
        assert client.ask(page).status == 200
        client.send(infer([tensor(place("o", 64))]))
        assert client.read() is None
        assert server.crashed


def test_length_that_is_no_number_is_refused_since_2_70() -> None:
    junk = request(
        "POST",
        "/v2/models/identity/infer",
        {},
        {"Inference-Header-Content-Length": "many"},
    )
    for version, beginning in (
        ("2.69.0", "[request id: <id_unknown>] The shape of the raw input"),
        ("2.70.0", "Unable to parse Inference-Header-Content-Length, got: many"),
    ):
        with triton(version) as server:
            assert ask(server.url, junk).error.startswith(beginning)


# --- unregistering in use -------------------------------------------------------------


@contextlib.contextmanager
def running(server: ScriptedServer) -> Iterator[RawConnection]:
    """A client whose request is inside the model, with r in use."""
    with RawConnection(server.url) as client:
        server.hold()
        client.send(infer([IN], [OUT]))
        server.wait_for(1)
        yield client


@pytest.mark.parametrize("version", ["2.50.0", "2.52.0"])
def test_region_in_use_is_not_unregistered(file: File, version: str) -> None:
    with triton(version) as server, running(known(server, file)) as client:
        assert both(ask(server.url, unregister("r"))) == (
            500,
            "Cannot unregister shared memory region 'r', it is currently in use.",
        )
        assert both(ask(server.url, UNREGISTER_ALL)) == (
            500,
            "Failed to unregister the following system shared memory regions: r ,",
        )
        assert ask(server.url, status("r")).status == 200
        server.release()
        assert client.read() is not None
        assert ask(server.url, unregister("r")).status == 200
        assert server.regions == {}
        assert not server.crashed


@pytest.mark.parametrize("version", ["2.53.0", "2.70.0"])
def test_region_in_use_goes_when_its_last_request_ends(
    file: File, version: str
) -> None:
    with triton(version) as server, running(known(server, file)) as client:
        assert ask(server.url, unregister("r")).status == 200
        assert ask(server.url, UNREGISTER_ALL).status == 200
        assert ask(server.url, status("r")).status == 200
        again = register("r", key=file.key, byte_size=SIZE)
        assert ask(server.url, again).error.endswith("'r' already in manager")
        with RawConnection(server.url) as second:
            second.send(infer([IN], [OUT]))
            server.wait_for(2)
            server.release()
            assert client.read() is not None
            assert second.read() is not None
        eventually(lambda: server.regions == {}, "the region is removed")
        assert ask(server.url, status("r")).status == 404


def test_region_in_use_is_torn_away_before_2_50(file: File) -> None:
    with triton("2.49.0") as server, running(known(server, file)) as client:
        assert not server.crashed
        assert ask(server.url, unregister("r")).status == 200
        assert server.crashed
        server.release()
        assert client.read() is None
        assert file.numbers(4096)[0] == 1024.0
        eventually(lambda: not is_listening(server), "the server has ended")
        server.restart()
        assert ask(server.url, infer([IN])).status == 404


def test_region_torn_away_while_the_model_reads_it_ends_the_server(file: File) -> None:
    def run(inputs: object) -> dict[str, Array]:
        assert ask(server.url, unregister("r")).status == 200
        return {"O": np.zeros(1, np.float32)}

    model = FakeModel(
        "m", inputs={"I": ("FP32", (16,))}, outputs={"O": ("FP32", (1,))}, run=run
    )
    read = tensor(place("r", 64), name="I", shape=[16])
    with (
        ScriptedServer([model], version="2.49.0") as server,
        RawConnection(known(server, file).url) as client,
    ):
        client.send(infer([read], model="m"))
        assert client.read() is None
        assert server.crashed


def is_listening(server: ScriptedServer) -> bool:
    try:
        RawConnection(server.url).close()
    except ConnectionError:
        return False
    return True


def test_file_that_shrinks_ends_the_server_when_it_is_touched(file: File) -> None:
    with triton("2.51.0") as server, RawConnection(known(server, file).url) as client:
        assert client.ask(infer([IN], [OUT])).status == 200
        file.shrink(4096)
        assert client.ask(infer([IN])).status == 200
        assert not server.crashed
        client.send(infer([IN], [OUT]))
        assert client.read() is None
        assert server.crashed
        assert "shrunk" in server.crash_reasons[0]


def test_client_that_leaves_does_not_stop_its_request(file: File) -> None:
    with triton("2.51.0") as server:
        with running(known(server, file)):
            pass
        assert file.numbers(4096)[0] == 1024.0
        assert server.in_model == 1
        server.release()
        eventually(lambda: file.numbers(4096)[0] == 0.0, "the output is written")
        assert file.numbers(4096) == file.numbers(0)


# --- models ---------------------------------------------------------------------------


def text_model(*, decoupled: bool = False) -> FakeModel:
    def backwards(inputs: object) -> dict[str, Array]:
        assert isinstance(inputs, dict)
        return {"OUT": inputs["IN"][::-1]}

    return FakeModel(
        "text",
        inputs={"IN": ("BYTES", (-1,))},
        outputs={"OUT": ("BYTES", (-1,))},
        run=backwards,
        decoupled=decoupled,
    )


ELEMENTS = b"\1\0\0\0a\3\0\0\0b\xe2\x82"


def text(shape: int, nbytes: int) -> bytes:
    given = tensor(
        {"binary_data_size": nbytes}, name="IN", datatype="BYTES", shape=[shape]
    )
    return infer(
        [given],
        [output({"binary_data": True}, name="OUT")],
        model="text",
        binary=ELEMENTS[:nbytes],
    )


def test_bytes_travel_in_binary_and_in_json() -> None:
    with ScriptedServer([text_model()]) as server:
        reply = ask(server.url, text(2, len(ELEMENTS)))
        assert reply.body.endswith(ELEMENTS[5:] + ELEMENTS[:5])
        given = tensor(name="IN", datatype="BYTES", shape=[2], data=["a", "é"])
        reply = ask(server.url, infer([given], model="text"))
        assert reply.json()["outputs"][0]["data"] == ["é", "a"]


@pytest.mark.parametrize(
    ("shape", "nbytes", "words"),
    [
        (3, 12, "expected 3 string elements for inference input 'IN'"),
        (1, 12, "unexpected number of string elements 2 for inference input 'IN'"),
        (2, 11, "expecting string of length 3 but only 2 bytes available"),
        (2, 7, "expecting 4 bytes but only 2 bytes available"),
    ],
)
def test_bytes_that_do_not_fit_their_shape_are_refused(
    shape: int, nbytes: int, words: str
) -> None:
    with ScriptedServer([text_model()]) as server:
        reply = ask(server.url, text(shape, nbytes))
        assert reply.status == 400
        assert words in reply.error


def test_decoupled_model_is_not_run_over_http() -> None:
    with ScriptedServer([text_model(decoupled=True)]) as server:
        assert ask(server.url, text(2, len(ELEMENTS))).status == 501
        config = ask(server.url, get("/v2/models/text/config")).json()
        assert config["model_transaction_policy"] == {"decoupled": True}


def test_statistics_count_successes_and_failures() -> None:
    with ScriptedServer([text_model()]) as server:
        ask(server.url, text(2, len(ELEMENTS)))
        ask(server.url, text(3, len(ELEMENTS)))
        stats = ask(server.url, get("/v2/models/text/stats")).json()["model_stats"][0]
        assert (stats["inference_count"], stats["execution_count"]) == (1, 1)
        server.restart()
        stats = ask(server.url, get("/v2/models/text/stats")).json()["model_stats"][0]
        assert stats["inference_count"] == 0


def test_versions_of_a_model_are_told_apart() -> None:
    model = FakeModel(
        "m",
        inputs={"I": ("FP32", (1,))},
        outputs={"O": ("FP32", (1,))},
        run=lambda inputs: {"O": inputs["I"]},
        versions=("10", "9"),
    )
    one = tensor(name="I", shape=[1], data=[1.0])
    with ScriptedServer([model]) as server:
        for path, version in (("m", "10"), ("m/versions/9", "9")):
            reply = ask(server.url, infer([one], model=path))
            assert reply.json()["model_version"] == version
        assert ask(server.url, infer([one], model="m/versions/1")).status == 404


@pytest.mark.parametrize("batch", [0, 9])
def test_batch_that_the_model_does_not_take_is_refused(batch: int) -> None:
    model = FakeModel(
        "m",
        inputs={"I": ("FP32", (2,))},
        outputs={"O": ("FP32", (2,))},
        run=lambda inputs: {"O": inputs["I"]},
        max_batch_size=8,
    )
    rows = tensor(name="I", shape=[batch, 2], data=[1.0] * (2 * batch))
    with ScriptedServer([model]) as server:
        assert ask(server.url, infer([rows], model="m")).status == 400
        shape = ask(server.url, get("/v2/models/m")).json()["inputs"][0]["shape"]
        assert shape == [-1, 2]
