"""Round trips of any tensor in any layout, one after another through one session."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmlane import Session
from shmlane.server import TritonServer
from tests.sessions import Array, all_free
from tests.tensor_models import DATATYPES
from tests.tensor_values import Shape, assert_same, tensor

pytestmark = pytest.mark.usefixtures("no_leftovers")

EXAMPLES = 25

sizes = st.one_of(st.integers(0, 6), st.integers(7, 70))
shapes = st.tuples(sizes, sizes, sizes).filter(lambda shape: math.prod(shape) < 5000)
seeds = st.integers(0, 2**16)
layouts = st.sampled_from(
    ["as it is", "transposed", "backwards", "every second", "Fortran", "read-only"]
)


def laid_out(datatype: str, shape: Shape, layout: str, seed: int) -> Array:
    """A tensor of that shape which lies in memory as `layout` says."""
    if layout == "transposed":
        return tensor(datatype, shape[::-1], seed=seed).transpose()
    if layout == "backwards":
        return tensor(datatype, shape, seed=seed)[::-1, :, ::-1]
    if layout == "every second":
        wide = (shape[0], 2 * shape[1], 2 * shape[2])
        return tensor(datatype, wide, seed=seed)[:, ::2, 1::2]
    array = tensor(datatype, shape, seed=seed)
    if layout == "Fortran":
        return np.asfortranarray(array)
    if layout == "read-only":
        array = array.copy()
        array.flags.writeable = False
    return array


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("memory", ["system", "wire"])
def test_any_tensor_in_any_layout_comes_back(
    tensors_server: TritonServer, memory: str, datatype: str
) -> None:
    model = f"echo_{datatype.lower()}"

    @settings(max_examples=EXAMPLES)
    @given(shape=shapes, layout=layouts, seed=seeds)
    def round_trip(shape: Shape, layout: str, seed: int) -> None:
        sent = laid_out(datatype, shape, layout, seed)
        for _ in range(2):
            received = session.infer({"INPUT__0": sent})["OUTPUT__0"]
            assert_same(received, np.ascontiguousarray(sent))

    with Session(tensors_server.http_url, model, memory=memory, slots=1) as session:
        round_trip()
        all_free(session)


@pytest.mark.parametrize("memory", ["system", "wire"])
def test_results_of_any_size_stay_what_they_were(
    tensors_server: TritonServer, memory: str
) -> None:
    # Views that are kept while other requests of other sizes come and go.
    @settings(max_examples=EXAMPLES)
    @given(many=st.lists(st.tuples(shapes, seeds), min_size=2, max_size=4))
    def keep(many: list[tuple[Shape, int]]) -> None:
        kept = []
        for shape, seed in many:
            sent = tensor("INT16", shape, seed=seed)
            with session.lease() as lease:
                lease.write("INPUT__0", sent)
                kept.append((sent, lease.infer()["OUTPUT__0"]))
            for expected, view in kept:
                assert_same(view, expected)

    with Session(
        tensors_server.http_url, "echo_int16", memory=memory, slots=2
    ) as session:
        keep()
        all_free(session)
