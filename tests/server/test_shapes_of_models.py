"""Models with many tensors, in batches, in parts, in chains and in one piece."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from shmlane import (
    InferFailed,
    RegionOptions,
    Session,
    ShmlaneError,
    TensorMismatch,
    Timeouts,
)
from shmlane.server import TritonServer
from tests.sessions import SHM, Array, all_free

pytestmark = pytest.mark.usefixtures("no_leftovers")

MEMORY = pytest.mark.parametrize("memory", ["system", "wire"])
MORE_THAN_2_GIB = (2 << 30) + 4097


def mixed(batch: int, *, width: int = 3, seed: int = 0) -> dict[str, Array]:
    """Inputs of `mixed`, the optional one not among them."""
    random = np.random.default_rng(seed)
    words = np.empty((batch, width), np.object_)
    for i in range(words.size):
        words.flat[i] = random.bytes(int(random.integers(0, 40)))
    numbers = random.integers(-1000, 1000, (batch, width), np.int32)
    return {"NUMBERS": numbers, "WORDS": words}


def assert_right(outputs: dict[str, Array], inputs: dict[str, Array]) -> None:
    """The outputs that came are what `mixed` makes of these inputs."""
    numbers, words = inputs["NUMBERS"], inputs["WORDS"]
    flags = inputs.get("FLAGS", np.zeros((len(numbers), 2), bool))
    expected = {
        "TOTALS": numbers.sum(axis=1, keepdims=True).tolist(),
        "BACKWARDS": [[word[::-1] for word in row] for row in words.tolist()],
        "FLIPPED": (~flags).tolist(),
    }
    assert outputs
    for name, array in outputs.items():
        assert array.tolist() == expected[name]


# --- batches, parts -------------------------------------------------------------------


@MEMORY
def test_batches_may_change_from_call_to_call(
    tensors_server: TritonServer, memory: str
) -> None:
    url = tensors_server.http_url
    with Session(url, "mixed", memory=memory, slots=1) as session:
        for seed, batch in enumerate((1, 8, 2, 7, 7, 3, 8, 1, 1, 6, 4, 5)):
            inputs = mixed(batch, width=1 + seed % 4, seed=seed)
            outputs = session.infer(inputs)
            assert len(outputs) == 3
            assert_right(outputs, inputs)
        all_free(session)


@MEMORY
def test_a_batch_beyond_the_largest_is_refused_before_sending(
    tensors_server: TritonServer, memory: str
) -> None:
    with Session(tensors_server.http_url, "mixed", memory=memory) as session:
        with pytest.raises(TensorMismatch, match=r"'NUMBERS'.*\(9, 3\).*at most 8"):
            session.infer(mixed(9))
        assert_right(session.infer(mixed(8)), mixed(8))
        assert all_free(session).late_replies == 0


@MEMORY
def test_an_optional_input_left_out_is_not_the_one_before(
    tensors_server: TritonServer, memory: str
) -> None:
    url = tensors_server.http_url
    with Session(url, "mixed", memory=memory, slots=1) as session:
        for seed in range(9):
            inputs = mixed(2, seed=seed)
            if seed % 3:
                inputs["FLAGS"] = np.array([[True, False], [seed % 2 == 0, True]])
            assert_right(session.infer(inputs), inputs)


@MEMORY
@pytest.mark.parametrize(
    "wanted",
    [["FLIPPED"], ["BACKWARDS"], ["BACKWARDS", "TOTALS"], ["TOTALS", "FLIPPED"]],
    ids="+".join,
)
def test_outputs_not_asked_for_do_not_come(
    tensors_server: TritonServer, memory: str, wanted: list[str]
) -> None:
    with Session(
        tensors_server.http_url, "mixed", memory=memory, outputs=wanted, slots=1
    ) as session:
        for seed in range(3):
            inputs = mixed(1 + seed, seed=seed)
            outputs = session.infer(inputs)
            assert sorted(outputs) == sorted(wanted)
            assert_right(outputs, inputs)


@MEMORY
def test_tensors_without_elements_travel_beside_others(
    tensors_server: TritonServer, memory: str
) -> None:
    url = tensors_server.http_url
    with Session(url, "mixed", memory=memory, slots=1) as session:
        for width in (3, 0, 2, 0):
            inputs = mixed(2, width=width, seed=width)
            outputs = session.infer(inputs)
            assert outputs["BACKWARDS"].shape == (2, width)
            assert_right(outputs, inputs)


@MEMORY
def test_a_result_without_dimensions_is_one_element_for_each_of_a_batch(
    tensors_server: TritonServer, memory: str
) -> None:
    # A model's own scalars; to clients each has the one dimension of the configuration.
    features = np.arange(12, dtype=np.float32).reshape(3, 4)
    with Session(tensors_server.http_url, "classified", memory=memory) as session:
        for batch in (3, 1, 2):
            sizes = session.infer({"FEATURES": features[:batch]})["SIZES"]
            assert sizes.tolist() == [[6.0], [22.0], [38.0]][:batch]


@MEMORY
@pytest.mark.parametrize(
    "scalar",
    [5, np.int32(5), np.array(5, np.int32), [5], np.array([5], np.int32)],
    ids=["int", "scalar of NumPy", "array without dimensions", "list", "array"],
)
def test_a_scalar_is_a_tensor_of_one_element(
    tensors_server: TritonServer, memory: str, scalar: object
) -> None:
    with Session(tensors_server.http_url, "doubled", memory=memory) as session:
        assert session.infer({"VALUES": scalar}, cast=True)["DOUBLED"].tolist() == [10]
        all_free(session)


# --- outputs that follow the data, chains ---------------------------------------------


@MEMORY
@pytest.mark.parametrize(
    ("model", "output", "factor"),
    [("repeated", "REPEATED", 1), ("ensemble", "RESULT", 2)],
)
def test_an_output_follows_the_values_of_its_input(
    tensors_server: TritonServer, memory: str, model: str, output: str, factor: int
) -> None:
    values = np.array([1, 2, 3], np.float32)
    url = tensors_server.http_url
    with Session(url, model, memory=memory, slots=1) as session:
        for counts in ([1, 1, 1], [0, 0, 0], [0, 500, 0], [1, 1, 1], [9, 0, 20_000]):
            inputs = {"VALUES": values, "COUNTS": np.array(counts, np.int32)}
            received = session.infer(inputs)[output]
            assert received.tolist() == np.repeat(values * factor, counts).tolist()
        all_free(session)


@MEMORY
def test_an_output_beyond_what_was_declared_is_never_cut(
    tensors_server: TritonServer, memory: str
) -> None:
    def ask(count: int) -> list[float]:
        inputs = {
            "VALUES": np.array([7], np.float32),
            "COUNTS": np.array([count], np.int32),
        }
        received: list[float] = session.infer(inputs)["REPEATED"].tolist()
        return received

    with Session(
        tensors_server.http_url,
        "repeated",
        memory=memory,
        slots=1,
        outputs={"REPEATED": (10,)},
    ) as session:
        assert ask(10) == [7] * 10
        if memory == "system":
            with pytest.raises(InferFailed, match=r"needs 44 bytes.* has 40"):
                ask(11)
        assert ask(2) == [7] * 2
        all_free(session)


# --- size -----------------------------------------------------------------------------


def test_more_than_2_gib_travel_in_one_tensor(tensors_server: TritonServer) -> None:
    skip_unless_free(SHM, MORE_THAN_2_GIB + (1 << 30), memory=MORE_THAN_2_GIB * 2)
    with Session(
        tensors_server.http_url,
        "sink_uint8",
        slots=1,
        shapes={"INPUT__0": (MORE_THAN_2_GIB,)},
        region=RegionOptions(prefault=False),
        timeouts=Timeouts(infer=90),
    ) as session:
        with session.lease() as lease:
            view = lease["INPUT__0"]
            view[-2:] = 7, 200
            assert lease.infer(timeout=90)["OUTPUT__0"].tolist() == [200]
            view[-1] = 9
            assert lease.infer(timeout=90)["OUTPUT__0"].tolist() == [9]
            del view
        all_free(session)


@pytest.mark.long
def test_more_than_2_gib_come_back_in_one_tensor(tensors_server: TritonServer) -> None:
    # Over the wire first, as nobody knows the size; through shared memory then.
    skip_unless_free(SHM, 3 * MORE_THAN_2_GIB, memory=6 * MORE_THAN_2_GIB)
    shape = (1, 1, MORE_THAN_2_GIB)
    with Session(
        tensors_server.http_url,
        "echo_uint8",
        slots=1,
        shapes={"INPUT__0": shape},
        region=RegionOptions(prefault=False),
        timeouts=Timeouts(infer=90),
    ) as session:
        for last in (7, 8):
            with session.lease() as lease:
                lease["INPUT__0"][..., -2:] = last, 100 + last
                received = lease.infer()["OUTPUT__0"]
                assert received.shape == shape
                assert received[0, 0, -2:].tolist() == [last, 100 + last]
                del received
        all_free(session)


def test_more_than_2_gib_are_not_sent_over_the_wire(
    tensors_server: TritonServer,
) -> None:
    # The server counts the bytes of a request in 31 bits and refuses more only when
    # it has them all. Zeros that are only read take no memory here.
    sent = np.zeros(MORE_THAN_2_GIB, np.uint8)
    with Session(
        tensors_server.http_url, "sink_uint8", memory="wire", slots=1
    ) as session:
        with pytest.raises(ShmlaneError, match=r"INPUT__0.* 2,?147,?48") as it:
            session.infer({"INPUT__0": sent})
        assert not it.value.retryable
        small = np.array([1, 2, 201], np.uint8)
        assert session.infer({"INPUT__0": small})["OUTPUT__0"].tolist() == [201]
        assert all_free(session).connections == 1


def skip_unless_free(mount: Path, nbytes: int, *, memory: int) -> None:
    """Skip where such a test would take the machine's memory from others."""
    free = shutil.disk_usage(mount).free
    if free < nbytes:
        pytest.skip(f"{mount} has {free >> 20} MiB free, it takes {nbytes >> 20} MiB")
    lines = Path("/proc/meminfo").read_text().splitlines()
    told = next(line for line in lines if line.startswith("MemAvailable"))
    available = int(told.split()[1]) << 10
    if available < memory:
        pytest.skip(f"{available >> 20} MiB are available, it takes {memory >> 20} MiB")
