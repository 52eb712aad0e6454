"""Requests as bytes: HTTP/1.1 and the KServe v2 JSON that Triton speaks.

Owns every byte that goes to the server, and what may stand in it. Refuses to do I/O and
to know what comes back (`replies`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .errors import UsageError
from .metadata import Shape

_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
# Triton does not decode escapes in paths: what would need one cannot be sent.
_PATH_NAME = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@-]+")

# With these a caller could turn an inference into other bytes than those prepared, or
# its reply into other bytes than those read.
_OWN_HEADERS = frozenset(
    {
        "host",
        "connection",
        "upgrade",
        "expect",
        "content-length",
        "content-encoding",
        "transfer-encoding",
        "accept-encoding",
        "inference-header-content-length",
    }
)


class TensorRef(NamedTuple):
    """One tensor of an inference request. `region` "" sends or asks for wire data.

    classes: ask for so many of the best classes instead of the output itself.
    """

    name: str
    datatype: str
    shape: Shape
    region: str
    offset: int
    nbytes: int
    classes: int = 0


class HttpRequests:
    """Builds the requests of one session: one server, one model, fixed headers."""

    def __init__(
        self,
        host: str,
        model: str,
        *,
        version: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._model = f"/v2/models/{path_name(model, 'model name')}"
        self._versioned = self._model
        if version:
            self._versioned += f"/versions/{path_name(version, 'model version')}"
        self._headers = {"host": header_line("Host", host)}
        self._headers |= _named(headers or {})
        self._fixed = _lines(self._headers)

    def build(
        self,
        method: str,
        path: str,
        body: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        more: int = 0,
    ) -> bytes:
        """The bytes of one request.

        headers: of this request, in the place of fixed ones of the same name. more:
        bytes that will be sent behind the body, as part of it.
        """
        data = body.encode()
        fixed = self._fixed
        if headers:
            fixed = _lines({**self._headers, **_named(headers)})
        head = f"{method} {path} HTTP/1.1\r\n{fixed}"
        # Without a length the server reads no body and closes (evhtp); GET needs none.
        if method != "GET":
            head += f"Content-Length: {len(data) + more}\r\n"
        # Where the JSON ends (KServe v2 binary tensor extension).
        if more:
            head += f"Inference-Header-Content-Length: {len(data)}\r\n"
        return b"%s\r\n%s" % (head.encode("latin-1"), data)

    def server_metadata(self) -> bytes:
        return self.build("GET", "/v2")

    def model_metadata(self) -> bytes:
        return self.build("GET", self._versioned)

    def model_config(self) -> bytes:
        return self.build("GET", f"{self._versioned}/config")

    def model_ready(self) -> bytes:
        return self.build("GET", f"{self._versioned}/ready")

    def repository_index(self) -> bytes:
        return self.build("POST", "/v2/repository/index")

    def register(self, name: str, key: str, nbytes: int) -> bytes:
        body = json.dumps({"key": key, "byte_size": nbytes})
        return self.build("POST", f"{_region_path(name)}/register", body)

    def unregister(self, name: str) -> bytes:
        return self.build("POST", f"{_region_path(name)}/unregister")

    def region_status(self, name: str) -> bytes:
        return self.build("GET", f"{_region_path(name)}/status")

    def all_regions(self) -> bytes:
        return self.build("GET", "/v2/systemsharedmemory/status")

    def infer(
        self,
        request_id: str,
        inputs: Sequence[TensorRef],
        outputs: Sequence[TensorRef],
        *,
        parameters: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """One inference, as far as the inputs that go behind it over the wire.

        parameters: members of the request's JSON object, each with a comma behind it.
        """
        body = (
            f'{{"id":{json.dumps(request_id)},{parameters}'
            f'"inputs":[{",".join(map(_input_json, inputs))}],'
            f'"outputs":[{",".join(map(_output_json, outputs))}]}}'
        )
        more = sum(each.nbytes for each in inputs if not each.region)
        path = f"{self._versioned}/infer"
        return self.build("POST", path, body, headers=headers, more=more)


def path_name(name: str, what: str) -> str:
    """`name` if it can stand in a request path as it is, else `UsageError`."""
    if not name:
        raise UsageError(f"the {what} is empty.")
    if not _PATH_NAME.fullmatch(name) or name in (".", ".."):
        raise UsageError(
            f"{what} {name!r} cannot be sent: Triton does not decode escaped paths, so"
            " only letters, digits and ._~!$&'()*+,;=:@- can be used.",
            name=name,
        )
    return name


def header_line(name: str, value: str) -> str:
    """`name: value` if that is one legal HTTP header line, else `UsageError`."""
    legal = value.isprintable() and value.isascii() and value == value.strip()
    if not _TOKEN.fullmatch(name) or not legal:
        raise UsageError(
            # Not the value, which may be a password.
            f"{name!r} is not a legal HTTP header: names are tokens, values are"
            " printable ASCII without space at the ends.",
            header=name,
        )
    return f"{name}: {value}"


def callers_header(name: str, value: str) -> str:
    if name.lower() in _OWN_HEADERS:
        raise UsageError(
            f"header {name!r} frames requests or replies and is set by shmlane.",
            header=name,
        )
    return header_line(name, value)


def _named(headers: Mapping[str, str]) -> dict[str, str]:
    """A caller's header lines by lower-case name."""
    return {
        name.lower(): callers_header(name, value) for name, value in headers.items()
    }


def _lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{line}\r\n" for line in headers.values())


def _region_path(name: str) -> str:
    return f"/v2/systemsharedmemory/region/{path_name(name, 'region name')}"


def _place_json(tensor: TensorRef) -> str:
    return (
        f'"shared_memory_region":"{tensor.region}",'
        f'"shared_memory_offset":{tensor.offset},'
        f'"shared_memory_byte_size":{tensor.nbytes}'
    )


def _input_json(tensor: TensorRef) -> str:
    shape = ",".join(map(str, tensor.shape))
    if tensor.region:
        content = f'"parameters":{{{_place_json(tensor)}}}'
    elif tensor.nbytes:
        content = f'"parameters":{{"binary_data_size":{tensor.nbytes}}}'
    else:
        # Triton refuses zero bytes in a region, until 2.60.
        content = '"data":[]'
    return (
        f'{{"name":{json.dumps(tensor.name)},"shape":[{shape}],'
        f'"datatype":"{tensor.datatype}",{content}}}'
    )


def _output_json(tensor: TensorRef) -> str:
    content = _place_json(tensor) if tensor.region else '"binary_data":true'
    if tensor.classes:
        content += f',"classification":{tensor.classes}'
    return f'{{"name":{json.dumps(tensor.name)},"parameters":{{{content}}}}}'
