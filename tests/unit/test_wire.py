"""Requests as bytes: exactly what is documented, and nothing smuggled in."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shmlane.datatypes import DTYPES
from shmlane.errors import UsageError
from shmlane.wire import HttpRequests, TensorRef

HOST = "localhost:8000"
LEGAL_IN_PATHS = set(
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._~!$&'()*+,;=:@-"
)
CONTROLS = [chr(code) for code in (*range(32), 127)]

Request = tuple[str, list[tuple[str, str]], bytes]


def parsed(raw: bytes, *, behind: int = 0) -> Request:
    """Request line, headers and body; what follows the body fails the test.

    behind: bytes of inputs that go behind it.
    """
    head, _, body = raw.partition(b"\r\n\r\n")
    line, *rest = head.decode("ascii").split("\r\n")
    headers = [
        (name, value) for name, _, value in (each.partition(": ") for each in rest)
    ]
    lengths = [int(value) for name, value in headers if name == "Content-Length"]
    assert lengths == ([] if line.startswith("GET ") else [len(body) + behind])
    split = [value for name, value in headers if name.startswith("Inference-Header")]
    assert split == ([str(len(body))] if behind else [])
    return line, headers, body


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


def requests(version: str = "", **headers: str) -> HttpRequests:
    return HttpRequests(HOST, "yolo.v8", version=version, headers=headers)


# --- control requests -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (HttpRequests.server_metadata, "GET /v2 HTTP/1.1"),
        (HttpRequests.model_metadata, "GET /v2/models/yolo.v8 HTTP/1.1"),
        (HttpRequests.model_config, "GET /v2/models/yolo.v8/config HTTP/1.1"),
        (HttpRequests.model_ready, "GET /v2/models/yolo.v8/ready HTTP/1.1"),
        (HttpRequests.repository_index, "POST /v2/repository/index HTTP/1.1"),
        (HttpRequests.all_regions, "GET /v2/systemsharedmemory/status HTTP/1.1"),
    ],
)
def test_questions_name_the_endpoint_and_have_no_body(
    build: Callable[[HttpRequests], bytes], line: str
) -> None:
    length = [("Content-Length", "0")] if line.startswith("POST") else []
    assert parsed(build(requests())) == (line, [("Host", HOST), *length], b"")


@pytest.mark.parametrize(
    ("build", "path"),
    [
        (HttpRequests.model_metadata, ""),
        (HttpRequests.model_config, "/config"),
        (HttpRequests.model_ready, "/ready"),
        (lambda requests: requests.infer("0", [], []), "/infer"),
    ],
)
def test_a_version_goes_into_every_path_of_the_model(
    build: Callable[[HttpRequests], bytes], path: str
) -> None:
    line, _, _ = parsed(build(requests(version="3")))
    assert line.split(" ")[1] == f"/v2/models/yolo.v8/versions/3{path}"


@pytest.mark.parametrize(
    ("raw", "method", "path"),
    [
        (requests().register("r.0.1", "//r", 8192), "POST", "r.0.1/register"),
        (requests().unregister("r.0.1"), "POST", "r.0.1/unregister"),
        (requests().region_status("r.0.1"), "GET", "r.0.1/status"),
    ],
    ids=["register", "unregister", "status"],
)
def test_region_requests_name_the_region(raw: bytes, method: str, path: str) -> None:
    line, _, body = parsed(raw)
    assert line == f"{method} /v2/systemsharedmemory/region/{path} HTTP/1.1"
    if path.endswith("/register"):
        # Without an offset: servers before 2.60 apply it twice.
        assert json.loads(body) == {"key": "//r", "byte_size": 8192}
    else:
        assert body == b""


def testcallers_headers_go_with_every_request() -> None:
    mine = HttpRequests(HOST, "m", headers={"X-Key": 'a "secret"', "traceparent": "0"})
    for raw in (mine.server_metadata(), mine.infer("0", [], []), mine.unregister("r")):
        _, headers, _ = parsed(raw)
        assert headers[:3] == [
            ("Host", HOST),
            ("X-Key", 'a "secret"'),
            ("traceparent", "0"),
        ]


# --- inference ------------------------------------------------------------------------

sizes = st.integers(0, 2**63 - 1)
tensors = st.builds(
    TensorRef,
    # Names that JSON escapes, and such as no other text can be mistaken for.
    st.one_of(
        st.sampled_from(['"', "\\", '","x":"', "a/b", "\0", "\u2028"]), st.text()
    ),
    st.sampled_from(sorted(DTYPES)),
    st.lists(sizes, max_size=4).map(tuple),
    st.from_regex(r"(?:shmlane\.[0-9a-f]{16}\.[0-9]+\.[0-9]+)?", fullmatch=True),
    sizes,
    sizes,
    classes=st.sampled_from([0, 1, 5]),
)


def content(tensor: TensorRef) -> dict[str, object]:
    """Where an input lies: in a region, behind the JSON, or nowhere as it is empty."""
    if tensor.region:
        return {"parameters": place(tensor)}
    if tensor.nbytes:
        return {"parameters": {"binary_data_size": tensor.nbytes}}
    return {"data": []}


def wish(tensor: TensorRef) -> dict[str, object]:
    """Where an output is to come, and as what."""
    where = place(tensor) if tensor.region else {"binary_data": True}
    return where | ({"classification": tensor.classes} if tensor.classes else {})


def place(tensor: TensorRef) -> dict[str, object]:
    return {
        "shared_memory_region": tensor.region,
        "shared_memory_offset": tensor.offset,
        "shared_memory_byte_size": tensor.nbytes,
    }


@given(st.sampled_from(["0", "1"]), st.lists(tensors), st.lists(tensors))
def test_infer_is_json_of_exactly_the_documented_fields(
    request_id: str, inputs: list[TensorRef], outputs: list[TensorRef]
) -> None:
    behind = sum(tensor.nbytes for tensor in inputs if not tensor.region)
    raw = requests().infer(request_id, inputs, outputs)
    line, _, body = parsed(raw, behind=behind)
    assert line == "POST /v2/models/yolo.v8/infer HTTP/1.1"
    assert json.loads(body.decode("ascii"), object_pairs_hook=unique) == {
        "id": request_id,
        "inputs": [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "datatype": tensor.datatype,
                **content(tensor),
            }
            for tensor in inputs
        ],
        "outputs": [
            {
                "name": tensor.name,
                "parameters": wish(tensor),
            }
            for tensor in outputs
        ],
    }


# --- what cannot be sent --------------------------------------------------------------


@given(st.text(max_size=8))
@example("model\r\nX: y")
@example("\u0661")
def test_names_in_paths_are_sent_as_they_are_or_refused(name: str) -> None:
    legal = set(name) <= LEGAL_IN_PATHS and name not in ("", ".", "..")
    builds: list[Callable[[], bytes]] = [
        lambda: HttpRequests(HOST, name).model_metadata(),
        lambda: requests().region_status(name),
    ]
    for build in builds:
        if legal:
            assert f"/{name}" in parsed(build())[0]
        else:
            with pytest.raises(UsageError) as caught:
                build()
            assert (repr(name) if name else "is empty") in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [".", "..", "a/b", "a b", "a%20b", "a?b", "a#b", "a\\b", "a\n", "a\0", "ä"],
)
def test_names_that_would_need_an_escape_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"model name .* cannot be sent"):
        HttpRequests(HOST, name)
    with pytest.raises(UsageError, match=r"region name .* cannot be sent"):
        requests().register(name, "/k", 1)
    if name:
        with pytest.raises(UsageError, match=r"model version .* cannot be sent"):
            HttpRequests(HOST, "m", version=name)


@given(st.text(max_size=6), st.text(max_size=6))
@example("X", "")
@example("X", "a\tb")
@example("X:", "y")
def test_a_header_is_sent_as_it_is_or_refused(name: str, value: str) -> None:
    try:
        mine = HttpRequests(HOST, "m", headers={name: value})
    except UsageError:
        return
    _, headers, body = parsed(mine.server_metadata())
    assert headers == [("Host", HOST), (name, value)]
    assert body == b""


@pytest.mark.parametrize("bad", [*CONTROLS, "\x80", "\xa0", "ü", "\u2028", "\ud800"])
def test_headers_with_controls_or_without_ascii_are_refused(bad: str) -> None:
    for name, value in [("X", f"a{bad}b"), ("X", bad), (f"X{bad}", "a")]:
        with pytest.raises(UsageError, match="is not a legal HTTP header"):
            HttpRequests(HOST, "m", headers={name: value})
    with pytest.raises(UsageError, match=r"'Host'.* is not a legal HTTP header"):
        HttpRequests(f"local{bad}host", "m")


@pytest.mark.parametrize("name", ["", " X", "X ", "X Y", "X:", "(X)", "X/Y", '"X"'])
def test_header_names_are_tokens(name: str) -> None:
    with pytest.raises(UsageError, match="names are tokens"):
        HttpRequests(HOST, "m", headers={name: "y"})


@pytest.mark.parametrize("value", [" y", "y ", " "])
def test_header_values_have_no_space_at_their_ends(value: str) -> None:
    with pytest.raises(UsageError, match="without space at the ends"):
        HttpRequests(HOST, "m", headers={"X": value})


@pytest.mark.parametrize(
    "name",
    [
        "Content-Length",
        "content-length",
        "Transfer-Encoding",
        "Connection",
        "Expect",
        "Host",
        "Inference-Header-Content-Length",
        "Content-Encoding",
        "Accept-Encoding",
        "Upgrade",
    ],
)
def test_headers_that_frame_a_request_or_reply_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"'{name}'.* is set by shmlane"):
        HttpRequests(HOST, "m", headers={name: "1"})
