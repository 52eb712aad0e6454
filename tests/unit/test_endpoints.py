"""Server addresses: which are understood, and how the servers there are reached."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmlane import Connection
from shmlane.endpoint import Endpoint
from shmlane.errors import ServerUnreachable, UsageError
from shmlane.timing import Deadline
from shmlane.transport import HttpConnection

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs poll and Unix")

REQUEST = b"GET /v2 HTTP/1.1\r\n\r\n"
LONG = 30.0
SHORT = 0.02


@pytest.mark.parametrize(
    ("url", "host", "port", "header"),
    [
        ("localhost", "localhost", 8000, "localhost:8000"),
        ("localhost:8001", "localhost", 8001, "localhost:8001"),
        ("localhost:", "localhost", 8000, "localhost:8000"),
        ("localhost:8001/", "localhost", 8001, "localhost:8001"),
        ("http://localhost", "localhost", 8000, "localhost:8000"),
        ("http://localhost:1/", "localhost", 1, "localhost:1"),
        ("HTTP://localhost:65535", "localhost", 65535, "localhost:65535"),
        ("127.0.0.1:8000", "127.0.0.1", 8000, "127.0.0.1:8000"),
        ("triton-1.my_net.example.:80", "triton-1.my_net.example.", 80, None),
        (f"{'x' * 63}:1", "x" * 63, 1, None),
        ("[::1]", "::1", 8000, "[::1]:8000"),
        ("[::1]:8001", "::1", 8001, "[::1]:8001"),
        ("http://[fe80::1%eth0]:80", "fe80::1%eth0", 80, "[fe80::1%eth0]:80"),
        ("[::ffff:127.0.0.1]:80", "::ffff:127.0.0.1", 80, "[::ffff:127.0.0.1]:80"),
    ],
)
def test_a_host_and_a_port_are_understood(
    url: str, host: str, port: int, header: str | None
) -> None:
    endpoint = Endpoint.parse(url)
    assert (endpoint.host, endpoint.port, endpoint.path) == (host, port, "")
    assert endpoint.host_header == (header or f"{host}:{port}")
    assert endpoint.url == url


@pytest.mark.parametrize("scheme", ["unix", "UNIX"])
@pytest.mark.parametrize("path", ["/s", "/run/triton/http.sock", "/a b?c#d%20:1", "/ü"])
def test_a_unix_path_is_taken_as_it_is(scheme: str, path: str) -> None:
    endpoint = Endpoint.parse(f"{scheme}://{path}")
    assert endpoint.path == path
    assert endpoint.host_header == "localhost"


@pytest.mark.parametrize("letter", ["x", "ü", "\udcff"])
def test_a_unix_path_may_have_107_bytes_and_no_more(letter: str) -> None:
    rest = 107 - len(letter.encode("utf-8", "surrogateescape")) - 1
    longest = f"unix:///{'x' * rest}{letter}"
    assert len(Endpoint.parse(longest).path) == rest + 2
    with pytest.raises(UsageError) as caught:
        Endpoint.parse(f"{longest}x")
    assert "must be absolute and at most 107 bytes, this one has 108." in str(
        caught.value
    )


@pytest.mark.parametrize(
    "url", ["unix://", "unix://run/s", "unix://./s", "unix:///a\0b"]
)
def test_a_unix_path_that_cannot_be_opened_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is not a Unix socket address"):
        Endpoint.parse(url)


@pytest.mark.parametrize(
    "url",
    ["https://h", "grpc://h:8001", "ftp://h", "tcp://h:1", "://h", "unix+http:///s"],
)
def test_another_scheme_is_refused_by_its_name(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        Endpoint.parse(url)
    assert str(caught.value) == (
        f"{url!r}: scheme {url.partition('://')[0]!r} is not supported. Use host:port,"
        " http://host:port or unix:///path/to/http.sock."
    )


@pytest.mark.parametrize(
    "url",
    [
        *("", "http://", "http:///", "/", ":8000", "[]:8000", "//localhost:8000"),
        *("h:0", "h:65536", "h:-1", "h:+1", "h:1.0", "h:0x50", "h:eighty", "h:\u0663"),
        *("h:80:80", "::1", "::1:8000", "fe80::1", "[::1", "::1]", "[::1]8000"),
        *("[h]:80", "[:::]:80", "[1.2.3.4]:80", "a[::1]:80", "[::1%]:80", "[v1.x]:80"),
        *("h/path", "http://h:8000/v2", "h?q", "h:80?q=1", "h#f", "h:80#f", "h:80?"),
        *("user@h", "user:pw@h:80", ":pw@h", "@h", "http://user@h"),
        *(" h", "h ", "a b", "h:80 ", "h\n", "a\tb", "h\0", "a\\b", "h,i", "h;i"),
        *("bücher.example", "\u24d7", "a..b", ".h", f"{'x' * 64}.example", "unix:/s"),
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        Endpoint.parse(url)
    assert str(caught.value).startswith(f"{url!r} is not a server address")


@pytest.mark.parametrize("scheme", ["unix", "UNIX"])
def test_the_spelling_of_the_servers_own_option_is_put_right(scheme: str) -> None:
    with pytest.raises(UsageError) as caught:
        Endpoint.parse(f"{scheme}:/run/triton/http.sock")
    assert caught.value.hint == (
        "Perhaps unix:///run/triton/http.sock (three slashes; tritonserver's own option"
        " has one)."
    )


@given(st.one_of(st.text(), st.text("h:[]/@.%-0123456789", max_size=12)))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        endpoint = Endpoint.parse(text)
    except UsageError:
        return
    # What came through can be given to the resolver and stand in a header.
    assert endpoint.host.encode("idna")
    assert endpoint.host_header.isascii()
    assert endpoint.host_header.isprintable()
    assert endpoint.path or 0 < endpoint.port < 65536


# --- how they are talked to ---------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"headers": {"X": 1}}, "headers={'X': ...}): give a mapping .* not int"),
        ({"headers": {1: "sesame"}}, "headers={1: ...}): give a mapping .* not int"),
        ({"headers": {"X": b"sesame"}}, "headers={'X': ...}): .* not bytes"),
        ({"headers": "sesame"}, "headers): give a mapping .* not str"),
        ({"headers": None}, "headers): give a mapping .* not NoneType"),
        ({"headers": [("X", "sesame")]}, "headers): give a mapping .* not list"),
        ({"replay": "yes"}, "replay): give True or False, not str"),
        ({"replay": 1}, "replay): give True or False, not int"),
    ],
)
def test_what_cannot_be_sent_is_refused_when_it_is_given(
    arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError) as caught:
        Connection(**arguments)
    before, _, after = told.partition(" .* ")
    assert before in str(caught.value)
    assert after in str(caught.value)
    assert "sesame" not in str(caught.value)


def test_a_connection_shows_the_names_of_its_headers_and_no_values() -> None:
    connection = Connection(headers={"Authorization": "sesame"}, replay=True)
    assert repr(connection) == "Connection(headers=['Authorization'], replay=True)"


def test_headers_are_those_that_were_checked() -> None:
    given = {"X": "1"}
    connection = Connection(headers=given)
    given["X"] = "2"
    assert connection.headers == {"X": "1"}
    assert pickle.loads(pickle.dumps(connection)) == connection


# --- reaching them ----------------------------------------------------------------


def test_a_unix_socket_is_connected_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        endpoint = Endpoint.parse(f"unix://{path}")
        with closing(HttpConnection.open(endpoint, Deadline(LONG))) as connection:
            assert connection.send(REQUEST)
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.recv(100) == REQUEST


class Late(Endpoint):
    """An address whose server begins to listen after some refusals."""

    refusals: list[OSError]
    begin: Callable[[], object]

    @classmethod
    def at(cls, url: str, begin: Callable[[], object]) -> Late:
        late = cls.parse(url)
        assert isinstance(late, Late)
        object.__setattr__(late, "refusals", [])
        object.__setattr__(late, "begin", begin)
        return late

    def connect(self, timeout: float | None) -> socket.socket:
        if len(self.refusals) == 3:
            self.begin()
        try:
            return super().connect(timeout)
        except OSError as error:
            self.refusals.append(error)
            raise


@pytest.mark.parametrize("limit", [LONG, None])
def test_a_refused_connection_is_tried_again_until_somebody_listens(
    limit: float | None,
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{listener.getsockname()[1]}"
        late = Late.at(url, listener.listen)
        with closing(HttpConnection.open(late, Deadline(limit))) as connection:
            assert connection.is_open
    assert [type(error) for error in late.refusals] == [ConnectionRefusedError] * 3


def test_a_unix_socket_is_waited_for_too(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with socket.socket(socket.AF_UNIX) as listener:

        def begin() -> None:
            listener.bind(str(path))
            listener.listen()

        late = Late.at(f"unix://{path}", begin)
        with closing(HttpConnection.open(late, Deadline(LONG))) as connection:
            assert connection.is_open
    assert [type(error) for error in late.refusals] == [FileNotFoundError] * 3


@pytest.mark.parametrize("limit", [0.0, 0.05])
def test_a_server_that_never_listens_is_unreachable_in_time(limit: float) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{deaf.getsockname()[1]}"
        deadline = Deadline(limit)
        with pytest.raises(ServerUnreachable) as caught:
            HttpConnection.open(Endpoint.parse(url), deadline)
    assert f"could not connect to {url} within {limit:g} s:" in str(caught.value)
    assert "Is tritonserver running, and is this its HTTP address?" in caught.value.hint
    assert caught.value.context == {"url": url, "timeout": limit}
    assert caught.value.retryable
    assert isinstance(caught.value.__cause__, OSError)


def test_a_name_that_nobody_knows_is_unreachable() -> None:
    with pytest.raises(
        ServerUnreachable, match=r"could not connect to host\.invalid:1"
    ):
        HttpConnection.open(Endpoint.parse("host.invalid:1"), Deadline(SHORT))


def test_an_address_is_deserted_only_where_nobody_can_be(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    at_path = Endpoint.parse(f"unix://{path}")
    assert at_path.is_deserted(LONG)
    with socket.socket(socket.AF_UNIX) as unix, socket.socket() as tcp:
        tcp.bind(("127.0.0.1", 0))
        at_port = Endpoint.parse(f"127.0.0.1:{tcp.getsockname()[1]}")
        unix.bind(str(path))
        assert at_path.is_deserted(LONG)
        assert at_port.is_deserted(LONG)
        unix.listen()
        tcp.listen()
        assert not at_path.is_deserted(LONG)
        assert not at_port.is_deserted(LONG)
    assert at_path.is_deserted(LONG)
    assert at_port.is_deserted(LONG)


def test_an_address_that_cannot_be_asked_is_not_called_deserted(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    assert not Endpoint.parse(f"unix://{tmp_path}/file/http.sock").is_deserted(LONG)


def test_a_failed_attempt_leaves_no_descriptor(tmp_path: Path) -> None:
    for url in (f"unix://{tmp_path}/none", f"unix://{tmp_path}"):
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match=r"No such file|refused"):
            Endpoint.parse(url).connect(SHORT)
        # There may be fewer: what earlier tests had may end only now.
        assert len(os.listdir("/proc/self/fd")) <= before


def test_a_process_without_descriptors_is_told_which_limit_it_met() -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = os.dup(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (last, limits[1]))
    try:
        with pytest.raises(ServerUnreachable) as caught:
            HttpConnection.open(Endpoint.parse("127.0.0.1:1"), Deadline(0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(last)
    assert "Too many open files" in str(caught.value)
    assert "see ulimit -n, or use fewer slots" in caught.value.hint


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="Linux has it")
def test_nothing_is_paced_within_a_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with Endpoint.parse(f"localhost:{port}").connect(5.0) as connected:
            name = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert name.rstrip(b"\0") == b"reno"
