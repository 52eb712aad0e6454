"""The scripted server answers as the real one does: same status, JSON and words.

Every request of the tables goes to a tritonserver and to a `ScriptedServer` of its
version, as bytes. Names that differ by nature are masked.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from shmlane.server import TritonServer
from shmlane.testing import ScriptedServer, identity_model, sink_model
from tests.raw_http import (
    RawConnection,
    RawReply,
    ask,
    get,
    infer,
    output,
    place,
    region_path,
    register,
    request,
    status,
    tensor,
    unregister,
)

pytestmark = pytest.mark.usefixtures("no_leftovers")

VALUES = np.arange(2048, dtype=np.float32)
RAW = VALUES[:16].tobytes()
OUT = output(place("R", 64, 4096))
IN = tensor(place("R", 64))
IDENTITY = "/v2/models/identity/infer"


class Sides(NamedTuple):
    """Both servers, and a file of 8192 bytes that both have registered as R."""

    real: str
    scripted: str
    path: Path

    def contents(self) -> npt.NDArray[np.float32]:
        return np.fromfile(self.path, np.float32)

    def reset(self) -> None:
        with self.path.open("r+b") as file:
            file.write(VALUES.tobytes())


@pytest.fixture(scope="module")
def sides(server: TritonServer) -> Iterator[Sides]:
    path = Path("/dev/shm") / f"scripted-test.{secrets.token_hex(8)}"
    name = masked_name("R", path)
    models = [identity_model(), sink_model()]
    with (
        ScriptedServer(models, version=server.version) as scripted,
        contextlib.ExitStack() as undo,
    ):
        undo.callback(path.unlink, missing_ok=True)
        path.write_bytes(VALUES.tobytes())
        for url in (server.http_url, scripted.url):
            reply = ask(url, register(name, key=f"/{path.name}", byte_size=8192))
            assert reply.status == 200
            undo.callback(ask, url, unregister(name))
        yield Sides(server.http_url, scripted.url, path)


def masked_name(name: str, path: Path) -> str:
    """The name under which a server that others use too knows our region."""
    return f"{path.name}.{name}"


def to_wire(sides: Sides, data: bytes) -> bytes:
    """A request of a table: R and K stand for our region and our file."""
    head, separator, body = data.partition(b"\r\n\r\n")
    name = masked_name("R", sides.path).encode()
    for short, long in (
        (b'"R"', b'"%s"' % name),
        (b"/K", f"/{sides.path.name}".encode()),
    ):
        body = body.replace(short, long)
    head = head.replace(b"/region/R/", b"/region/%s/" % name)
    whole = len(body) - len(data.partition(b"\r\n\r\n")[2])
    head = re.sub(
        rb"(Content-Length: )([0-9]+)",
        lambda found: found[1] + str(int(found[2]) + whole).encode(),
        head,
    )
    return head + separator + body


def comparable(reply: RawReply | None) -> Any:
    """What must be equal: status, text, tensors; without what differs by nature."""
    if reply is None:
        return "closed"
    body: Any = reply.body
    length = reply.headers.get("inference-header-content-length")
    if length is not None:
        body = [json.loads(body[: int(length)]), body[int(length) :]]
    elif body:
        body = json.loads(body)
    return reply.status, reply.headers["content-type"], masked(body)


def masked(body: Any) -> Any:
    if isinstance(body, dict):
        hidden = {"platform"} | ({"name"} if "extensions" in body else set())
        return {key: masked(value) for key, value in body.items() if key not in hidden}
    if isinstance(body, list):
        return [masked(each) for each in body]
    if isinstance(body, str):
        # The words of one JSON parser, and the order of one hash map.
        body = re.sub(r"(parse the request JSON buffer: ).*", r"\1...", body)
        return re.sub(r"(Got input\(s\) )\[.*?\]", r"\1[...]", body)
    return body


def answers(url: str, data: bytes) -> Any:
    with RawConnection(url) as connection:
        connection.send(data)
        return comparable(connection.read())


def check_same(sides: Sides, data: bytes) -> None:
    """Ask both; also what the request left in the shared file must be equal."""
    data = to_wire(sides, data)
    sides.reset()
    real, real_file = answers(sides.real, data), sides.contents()
    sides.reset()
    scripted, scripted_file = answers(sides.scripted, data), sides.contents()
    assert scripted == real
    np.testing.assert_array_equal(scripted_file, real_file)


# --- models and paths -----------------------------------------------------------------

PATHS = [
    ("GET", "/v2"),
    ("GET", "/v2/"),
    ("POST", "/v2"),
    ("DELETE", "/v2"),
    ("FOO", "/v2"),
    ("GET", "/nope"),
    ("GET", "/v2/nope"),
    ("GET", "/v2/health/live"),
    ("GET", "/v2/health/ready"),
    ("POST", "/v2/health/ready"),
    ("GET", "/v2/models/sink"),
    ("GET", "/v2/models/sink/versions/1"),
    ("GET", "/v2/models/sink/versions/2"),
    ("GET", "/v2/models/sink/versions/x"),
    ("POST", "/v2/models/sink"),
    ("GET", "/v2/models/none"),
    ("GET", "/v2/models/sink/ready"),
    ("GET", "/v2/models/none/ready"),
    ("GET", "/v2/models/sink/versions/2/ready"),
    ("GET", "/v2/models/none/config"),
    ("GET", "/v2/models/none/stats"),
    ("GET", "/v2/models/sink/infer"),
    ("POST", "/v2/repository/index"),
    ("GET", "/v2/repository/index"),
    ("GET", "/v2/systemsharedmemory/region/none/status"),
    ("POST", "/v2/systemsharedmemory/status"),
    ("GET", "/v2/systemsharedmemory/region/none/register"),
    ("GET", "/v2/systemsharedmemory/region/none/unregister"),
    ("GET", "/v2/cudasharedmemory/status"),
    ("GET", "/v2/cudasharedmemory/region/none/status"),
    ("POST", "/v2/cudasharedmemory/region/none/unregister"),
    ("GET", "/v2/health/live?verbose=1"),
    ("GET", "http://any.host/v2/health/live"),
]


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_path_is_answered_like_triton_does(
    sides: Sides, method: str, path: str
) -> None:
    check_same(sides, request(method, path))


def test_config_agrees_in_what_clients_read(sides: Sides) -> None:
    real, scripted = (
        ask(url, get("/v2/models/sink/config")).json() for url in sides[:2]
    )
    assert scripted["max_batch_size"] == real["max_batch_size"]
    for kind in ("input", "output"):
        (mine,), (theirs,) = scripted[kind], real[kind]
        assert (
            mine.items()
            >= {key: theirs[key] for key in ("name", "data_type", "dims")}.items()
        )


def test_statistics_have_the_fields_of_tritons(sides: Sides) -> None:
    def shape_of(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shape_of(each) for key, each in value.items()}
        return [shape_of(each) for each in value] if isinstance(value, list) else None

    for url in sides[:2]:
        ask(url, to_wire(sides, infer([IN], [OUT], model="sink")))
    real, scripted = (
        ask(url, get("/v2/models/sink/stats")).json() for url in sides[:2]
    )
    assert shape_of(scripted) == shape_of(real)


# --- registering ----------------------------------------------------------------------

REGISTRATIONS: Mapping[str, bytes] = {
    "without a body": request("POST", region_path("x", "register")),
    "bad JSON": request("POST", region_path("x", "register"), b"{x"),
    "no object": request("POST", region_path("x", "register"), []),
    "no key": register("x", byte_size=4),
    "no size": register("x", key="/K"),
    "float size": register("x", key="/K", byte_size=4096.0),
    "negative size": register("x", key="/K", byte_size=-1),
    "string size": register("x", key="/K", byte_size="4"),
    "null size": register("x", key="/K", byte_size=None),
    "size of 65 bits": register("x", key="/K", byte_size=1 << 64),
    "number as key": register("x", key=5, byte_size=4),
    "string offset": register("x", key="/K", byte_size=4, offset="x"),
    "no name": request(
        "POST", "/v2/systemsharedmemory/register", {"key": "/K", "byte_size": 4}
    ),
    "name known": register("R", key="//K", byte_size=4096),
    "name known, no such file": register("R", key="/no.such.file", byte_size=4096),
    "no such file": register("x", key="/no.such.file", byte_size=4096),
    "unknown field": register("x", key="/no.such.file", byte_size=4096, foo=1),
    "too large": register("x", key="////K", byte_size=8193),
    "too large with its offset": register(
        "x", key="////K", byte_size=8192, offset=4096
    ),
    "no bytes": register("x", key="/////K", byte_size=0),
    "offset in a page": register("x", key="/////K", byte_size=64, offset=8),
    "sum of 65 bits": register(
        "x", key="/////K", byte_size=(1 << 64) - 4096, offset=8192
    ),
    "slash": register("x", key="/", byte_size=4096),
    "empty key": register("x", key="", byte_size=4096),
    "this folder": register("x", key=".", byte_size=4096),
    "parent folder": register("x", key="..", byte_size=4096),
    "subfolder": register("x", key="/./K", byte_size=4096),
    "key of 256 bytes": register("x", key="/" + "x" * 256, byte_size=4096),
    "CUDA, short handle": request(
        "POST",
        "/v2/cudasharedmemory/region/x/register",
        {"raw_handle": {"b64": "AAAA"}, "device_id": 0, "byte_size": 4},
    ),
    "CUDA, no handle": request("POST", "/v2/cudasharedmemory/region/x/register", {}),
}


@pytest.mark.parametrize("case", REGISTRATIONS)
def test_refused_registration_sounds_like_tritons(sides: Sides, case: str) -> None:
    check_same(sides, REGISTRATIONS[case])


def test_link_is_not_followed(sides: Sides) -> None:
    link = sides.path.with_name(f"{sides.path.name}.link")
    os.symlink(sides.path, link)
    try:
        check_same(sides, register("x", key=f"/{link.name}", byte_size=4096))
    finally:
        link.unlink()


def test_one_file_is_registered_under_several_spellings(sides: Sides) -> None:
    for url in sides[:2]:
        spellings = ("//", "")
        names = [masked_name(f"spelling{len(each)}", sides.path) for each in spellings]
        for name, slashes in zip(names, spellings, strict=True):
            key = slashes + sides.path.name
            assert ask(url, register(name, key=key, byte_size=4096)).status == 200
            known = ask(url, status(name)).json()
            assert known == [{"name": name, "key": key, "offset": 0, "byte_size": 4096}]
        for name in names:
            assert ask(url, unregister(name)).status == 200
            assert ask(url, status(name)).status == 404
            assert ask(url, unregister(name)).status == 200


# --- inference ------------------------------------------------------------------------

JSON_IN = tensor(shape=(1, 1, 1, 2), data=[1.5, 2])
BINARY = output({"binary_data": True})
INFERENCES: Mapping[str, bytes] = {
    "shared memory both ways": infer([IN], [OUT]),
    "without an id": request("POST", IDENTITY, {"inputs": [IN], "outputs": [OUT]}),
    "sink": infer([IN], [OUT], model="sink"),
    "version in the path": infer([IN], [OUT], model="identity/versions/1"),
    "odd offsets": infer([tensor(place("R", 64, 1))], [output(place("R", 64, 4097))]),
    "one block both ways": infer([IN], [output(place("R", 64))]),
    "larger output block": infer([IN], [output(place("R", 256, 4096))]),
    "no outputs": infer([IN]),
    "no outputs listed": infer([IN], []),
    "plain output": infer([IN], [output()]),
    "binary output": infer([IN], [BINARY]),
    "binary output refused": infer([IN], [output({"binary_data": False})]),
    "binary outputs by default": infer([IN], parameters={"binary_data_output": True}),
    "output twice": infer([IN], [OUT, BINARY]),
    "block and binary data off": infer(
        [IN], [output({**place("R", 64, 4096), "binary_data": False})]
    ),
    "JSON both ways": infer([JSON_IN], [output()]),
    "nested JSON": infer([tensor(shape=(1, 1, 1, 2), data=[[[[1.5, 2]]]])]),
    "float that is not exact": infer([tensor(shape=(1, 1, 1, 1), data=[0.1])]),
    "too few numbers": infer([tensor(shape=(1, 1, 1, 2), data=[1.5])]),
    "too many numbers": infer([tensor(shape=(1, 1, 1, 2), data=[1, 2, 3])]),
    "no numbers": infer([tensor(shape=(1, 1, 1, 1), data=["a"])]),
    "binary in and out": infer(
        [tensor({"binary_data_size": 64})], [BINARY], binary=RAW
    ),
    "binary input cut": infer([tensor({"binary_data_size": 64})], binary=RAW[:-4]),
    "binary input too long": infer([tensor({"binary_data_size": 64})], binary=RAW * 2),
    "binary input of another size": infer(
        [tensor({"binary_data_size": 60})], binary=RAW[:60]
    ),
    "empty JSON": infer([tensor(shape=(1, 1, 1, 0), data=[])], [BINARY]),
    "empty binary": infer(
        [tensor({"binary_data_size": 0}, shape=(1, 1, 1, 0))], [BINARY]
    ),
    "empty block": infer([tensor(place("R", 0), shape=(1, 1, 1, 0))]),
    "empty block behind the start": infer(
        [tensor(place("R", 0, 64), shape=(1, 1, 1, 0))]
    ),
    "unknown region": infer([tensor(place("none", 64))], [OUT]),
    "unknown region for an output": infer([IN], [output(place("none", 64))]),
    "offset at the end": infer([tensor(place("R", 64, 8192))], [OUT]),
    "block over the end": infer([tensor(place("R", 64, 8160))], [OUT]),
    "output at the end": infer([IN], [output(place("R", 64, 8192))]),
    "output over the end": infer([IN], [output(place("R", 64, 8160))]),
    "size and offset wrap": infer([tensor(place("R", (1 << 64) - 5, 10))], [OUT]),
    "block too large for the shape": infer([tensor(place("R", 128))], [OUT]),
    "block too small, without an id": request(
        "POST", IDENTITY, {"inputs": [tensor(place("R", 32))]}
    ),
    "no size": infer([tensor(place("R", None, 0))], [OUT]),
    "no output size": infer([IN], [output(place("R", None, 4096))]),
    "output block too small": infer([IN], [output(place("R", 32, 4096))]),
    "offset without a region": infer([tensor(place(None, 64, 0))]),
    "output offset without a region": infer([IN], [output(place(None, 64, 0))]),
    "number as region": infer([tensor({"shared_memory_region": 5})]),
    "string as offset": infer([tensor(place("R", 64, "x"))]),
    "float as size": infer([tensor(place("R", 64.0))]),
    "negative offset": infer([tensor(place("R", 64, -1))]),
    "number as output region": infer([IN], [output({"shared_memory_region": 5})]),
    "negative output size": infer([IN], [output(place("R", -1))]),
    "region and data": infer([tensor(place("R", 64), data=[1] * 16)]),
    "region and binary data": infer(
        [tensor({**place("R", 64), "binary_data_size": 64})], binary=RAW
    ),
    "data and binary data": infer(
        [tensor({"binary_data_size": 64}, data=[1] * 16)], binary=RAW
    ),
    "no data": infer([tensor()]),
    "block and classification": infer(
        [IN], [output({**place("R", 64, 4096), "classification": 1})]
    ),
    "block and binary data": infer(
        [IN], [output({**place("R", 64, 4096), "binary_data": True})]
    ),
    "unknown output": infer([IN], [output(place("R", 64), name="NONE")]),
    "input too many": infer([IN, tensor(place("R", 64), name="NONE")], [OUT]),
    "input twice": infer([IN, IN], [OUT]),
    "no input": infer([], [OUT]),
    "another input": infer([tensor(place("R", 64), name="NONE")], [OUT]),
    "no inputs": infer(None, [OUT]),
    "inputs are a number": request("POST", IDENTITY, {"inputs": 5}),
    "another datatype": infer([tensor(place("R", 64), datatype="INT32")], [OUT]),
    "no datatype of Triton": infer([tensor(place("R", 64), datatype="XX")], [OUT]),
    "input without a name": infer([{"shape": [1], "datatype": "FP32"}]),
    "input without a datatype": infer([{"name": "INPUT__0", "shape": [1]}]),
    "input without a shape": infer([{"name": "INPUT__0", "datatype": "FP32"}]),
    "output without a name": infer([IN], [{}]),
    "negative size in a shape": infer([tensor(place("R", 64), shape=(1, 1, 1, -16))]),
    "float in a shape": infer([tensor(place("R", 64), shape=(1, 1, 1, 16.0))]),
    "string in a shape": infer([tensor(place("R", 64), shape=("a",))]),
    "too few dimensions": infer([tensor(place("R", 64), shape=(1, 1, 16))]),
    "unknown model": infer([IN], [OUT], model="none"),
    "unknown version": infer([IN], [OUT], model="identity/versions/3"),
    "version that is no number": infer([IN], [OUT], model="identity/versions/x"),
    "escaped model name": infer([IN], [OUT], model="%69dentity"),
    "bad JSON": request("POST", IDENTITY, b"{x"),
    "something behind the JSON": request("POST", IDENTITY, b"{} x"),
    "a list": request("POST", IDENTITY, []),
    "number as id": infer([IN], [OUT], id=5),
    "JSON length beyond the body": infer(
        [IN], headers={"Inference-Header-Content-Length": "999"}
    ),
    "negative JSON length": infer(
        [IN], headers={"Inference-Header-Content-Length": "-1"}
    ),
    "JSON length that is no number": infer(
        [IN], headers={"Inference-Header-Content-Length": "many"}
    ),
    "raw binary request": request(
        "POST", IDENTITY, RAW, {"Inference-Header-Content-Length": "0"}
    ),
    "no body": request("POST", IDENTITY),
    "reserved parameter": infer([IN], [OUT], parameters={"triton_x": 1}),
    "parameter that is a list": infer([IN], [OUT], parameters={"x": [1]}),
    "parameters of all types": infer(
        [IN], [OUT], parameters={"a": 1, "b": "x", "c": True, "d": 1.5}
    ),
    "sequence": infer(
        [IN], [OUT], parameters={"sequence_id": 1, "sequence_start": True}
    ),
    "model refuses": infer([IN], [OUT], parameters={"delay_ms": -1}),
    "model refuses no elements": infer(
        [tensor(shape=(1, 1, 1, 0), data=[])], [BINARY], model="sink"
    ),
    "model waits": infer([IN], [OUT], parameters={"delay_ms": 1}),
    "unknown compression": infer([IN], [OUT], headers={"Content-Encoding": "br"}),
}


@pytest.mark.parametrize("case", INFERENCES)
def test_inference_is_answered_like_triton_does(sides: Sides, case: str) -> None:
    check_same(sides, INFERENCES[case])


# --- the connection -------------------------------------------------------------------

BODY = infer([JSON_IN]).partition(b"\r\n\r\n")[2]
POST = f"POST {IDENTITY} HTTP/1.1\r\n".encode()
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CONNECTIONS: Mapping[str, bytes] = {
    "nothing but a length": POST + LENGTH + b"\r\n" + BODY,
    "lower case, no space": POST + LENGTH.lower().replace(b" ", b"") + b"\r\n" + BODY,
    "no length": POST + b"\r\n" + BODY,
    "no length, no body": POST + b"\r\n",
    "told to close": POST + LENGTH + b"Connection: close\r\n\r\n" + BODY,
    "HTTP/1.0 kept alive": POST.replace(b"1.1", b"1.0")
    + LENGTH
    + b"Connection: keep-alive\r\n\r\n"
    + BODY,
    "refused and kept alive": infer([IN], model="none"),
    "line feeds only": b"GET /v2/health/live HTTP/1.1\n\n",
    "no HTTP": b"hello\r\n\r\n",
    "no header": b"GET /v2/health/live HTTP/1.1\r\nXYZ\r\n\r\n",
    "negative length": POST + b"Content-Length: -1\r\n\r\n" + BODY,
    "head of 8 KB": b"GET /v2/health/live HTTP/1.1\r\nX: " + b"a" * 8000 + b"\r\n\r\n",
    "head of 64 KB": b"GET /v2/health/live HTTP/1.1\r\nX: "
    + b"a" * 64000
    + b"\r\n\r\n",
}


@pytest.mark.parametrize("case", CONNECTIONS)
def test_connection_lives_on_where_tritons_does(sides: Sides, case: str) -> None:
    outcomes = []
    for url in sides[:2]:
        with RawConnection(url) as connection:
            connection.send(CONNECTIONS[case])
            outcomes.append((comparable(connection.read()), connection.is_alive()))
    real, scripted = outcomes
    assert scripted == real


def test_pipelined_inferences_are_answered_and_other_requests_get_stuck(
    sides: Sides,
) -> None:
    for url in sides[:2]:
        with RawConnection(url) as connection:
            connection.send(infer([JSON_IN]) * 3)
            assert [connection.read() is not None for _ in range(3)] == [True] * 3
        with RawConnection(url) as connection:
            connection.send(get("/v2/health/live") * 2)
            assert connection.read() is not None
            connection.socket.settimeout(0.1)
            with pytest.raises(TimeoutError):
                connection.read()
