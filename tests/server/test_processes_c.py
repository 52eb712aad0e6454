"""A C program that knows only the documented format fills slots of Python programs."""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmlane import HandoffExpired, Session, SlotRef
from shmlane.server import TritonServer
from tests.sessions import all_free, fill, frame, open_sink

pytestmark = pytest.mark.usefixtures("no_leftovers")

SOURCE = Path(__file__).parents[2] / "examples" / "c" / "fill_slot.c"
STRICT = ("-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O2")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("c") / "fill_slot"
    subprocess.run(["gcc", *STRICT, "-o", program, SOURCE], check=True, timeout=60)
    return program


@pytest.fixture
def home(server: TritonServer) -> Iterator[Session]:
    with open_sink(server) as session:
        yield session
        all_free(session)


def run(
    program: Path, *arguments: object, data: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    command = [str(program), *map(str, arguments)]
    return subprocess.run(
        command, input=data, capture_output=True, timeout=30, check=False
    )


def filled(program: Path, *arguments: object, data: bytes) -> SlotRef:
    """The reference that the program prints for the slot that it has filled."""
    done = run(program, *arguments, data=data)
    assert (done.returncode, done.stderr) == (0, b""), done.stderr
    return SlotRef.parse(done.stdout.decode().strip())


def refusal(program: Path, *arguments: object, data: bytes = b"") -> str:
    done = run(program, *arguments, data=data)
    assert (done.returncode, done.stdout) == (1, b"")
    return done.stderr.decode()


def empty(home: Session) -> SlotRef:
    with home.lease() as lease:
        return lease.detach()


@contextlib.contextmanager
def region_of(data: bytes | bytearray) -> Iterator[Path]:
    """A region with these bytes, in use: sessions that start remove what is not."""
    token = secrets.token_hex(8)
    made, path = Path("/dev/shm", f"made.{token}"), Path("/dev/shm", f"shmlane.{token}")
    made.write_bytes(data)
    try:
        with made.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            made.rename(path)
            yield path
    finally:
        made.unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def test_what_c_fills_is_sent_by_python(
    home: Session, program: Path, server: TritonServer
) -> None:
    with Session(server.http_url, "sink", slots=1) as consumer:
        for value, session in ((3, home), (4, consumer), (5, home)):
            ref = empty(home)
            new = filled(program, ref, "INPUT__0", data=frame(value).tobytes())
            assert new == SlotRef(ref.region, ref.slot, ref.generation + 1)
            with session.adopt(new) as lease:
                assert lease.infer()["OUTPUT__0"] == [value]
                assert np.array_equal(lease["INPUT__0"], frame(value))


def test_c_says_which_shape_it_gives(server: TritonServer, program: Path) -> None:
    batch = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    shapes = {"INPUT__0": (1, 2, 3, 8)}
    with Session(server.http_url, "identity", slots=1, shapes=shapes) as home:
        ref = filled(
            program, empty(home), "INPUT__0", *batch.shape, data=batch.tobytes()
        )
        with home.adopt(ref) as lease:
            assert np.array_equal(lease.infer()["OUTPUT__0"], batch)
        all_free(home)


def test_without_a_shape_c_says_how_to_give_one(
    server: TritonServer, program: Path
) -> None:
    with Session(server.http_url, "identity", slots=1) as home:
        told = refusal(program, empty(home), "INPUT__0", data=bytes(4))
        assert "no shape yet" in told
        assert "fill_slot REFERENCE INPUT__0 1 3 640 640" in told
        all_free(home)


def test_c_fills_what_has_outgrown_its_block(home: Session, program: Path) -> None:
    with home.lease() as lease:
        lease.write("INPUT__0", frame(1, size=5000))
        ref = lease.detach()
    data = frame(8, size=5000).tobytes()
    with home.adopt(filled(program, ref, "INPUT__0", data=data)) as lease:
        assert lease.infer()["OUTPUT__0"] == [8]


def test_a_stale_reference_is_refused(home: Session, program: Path) -> None:
    data = frame(1).tobytes()
    old = empty(home)
    home.adopt(old).release()
    assert "of no use" in refusal(program, old, "INPUT__0", data=data)
    ref = empty(home)
    home.adopt(filled(program, ref, "INPUT__0", data=data)).release()
    assert "of no use" in refusal(program, ref, "INPUT__0", data=data)


def test_a_slot_that_somebody_has_is_refused(
    home: Session, program: Path, server: TritonServer
) -> None:
    with home.lease() as lease:
        fill(lease, 6)
        ref = lease.detach()
    with (
        Session(server.http_url, "sink", slots=1) as consumer,
        consumer.adopt(ref) as lease,
    ):
        told = refusal(program, ref, "INPUT__0", data=frame(1).tobytes())
        assert "another process has adopted" in told
        assert lease.infer()["OUTPUT__0"] == [6]


@pytest.mark.parametrize(
    ("tensor", "shape", "nbytes", "message"),
    [
        ("INPUT__9", (), 32, "no tensor INPUT__9"),
        ("OUTPUT__0", (), 4, "is an output"),
        ("INPUT__0", (), 31, "32 bytes, given were 31\n"),
        ("INPUT__0", (), 33, "32 bytes, given were more than 32\n"),
        ("INPUT__0", (), 0, "32 bytes, given were 0\n"),
        ("INPUT__0", (1, 1, 1, 5000), 20000, "do not fit"),
        ("INPUT__0", (1, 1, 0, 8), 0, "dimension cannot be 0"),
        ("INPUT__0", (2**40, 2**40, 1, 1), 0, "dimension cannot be"),
        ("INPUT__0", (1,) * 20, 4, "20 dimensions"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_slot_goes_home(
    home: Session,
    program: Path,
    tensor: str,
    shape: tuple[int, ...],
    nbytes: int,
    message: str,
) -> None:
    ref = empty(home)
    told = refusal(program, ref, tensor, *shape, data=bytes(nbytes))
    assert message in told
    if tensor == "INPUT__0":
        # It had begun: the home finds that it is gone.
        all_free(home)
    with contextlib.suppress(HandoffExpired):
        home.adopt(ref).release()


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("", "no reference"),
        ("shmlane.0123456789abcdef", "no reference"),
        ("shmlane.0123456789abcdef:0:1x", "no reference"),
        ("shmlane.0123456789abcdef:0:1", "No such file"),
        ("../../../etc/passwd:0:1", "not the name of a region"),
        ("shmlane./../etc/passwdxx:0:1", "not the name of a region"),
    ],
)
def test_what_is_no_reference_is_refused(
    program: Path, reference: str, message: str
) -> None:
    assert message in refusal(program, reference, "INPUT__0")


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"shmlost\0", "is not a region"),
        (8, struct.pack("<I", 1), "version 1, known is 2"),
        (12, struct.pack("<I", 0), "no slot"),
        (16, struct.pack("<Q", 2**63), "beyond the end"),
        (60, struct.pack("<I", 2**31), "contradicts itself"),
        (64, struct.pack("<Q", 2**64 - 8), "beyond the end"),
    ],
)
def test_a_header_that_cannot_be_is_refused(
    home: Session,
    program: Path,
    offset: int,
    value: bytes,
    message: str,
) -> None:
    ref = empty(home)
    data = bytearray(Path("/dev/shm", ref.region).read_bytes())
    data[offset : offset + len(value)] = value
    with region_of(data) as copy:
        told = refusal(program, f"{copy.name}:0:1", "INPUT__0", data=bytes(32))
        copy.write_bytes(data[:70])
        refusal(program, f"{copy.name}:0:1", "INPUT__0", data=bytes(32))
    assert message in told
    home.adopt(ref).release()


def test_the_program_says_how_it_is_used(program: Path) -> None:
    assert "usage" in refusal(program)
