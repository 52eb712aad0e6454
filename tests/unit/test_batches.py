"""Batches of columns through a model, as Ray Data maps them, on a scripted server."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shmlane import (
    BatchInfer,
    InferFailed,
    PoolClosed,
    TensorMismatch,
    UnknownTensor,
    UsageError,
)
from shmlane.testing import FakeModel, ScriptedServer
from tests.sessions import Array
from tests.unit.one_slot import files_of

FEW = np.arange(12, dtype=np.float32).reshape(4, 3)


def _rows(inputs: Mapping[str, Array]) -> dict[str, Array]:
    values = inputs["VALUES"]
    marks = inputs.get("MARKS", np.full((len(values), 2), -1, np.int8))
    return {"SUMS": values.sum(axis=1, keepdims=True), "MARKED": marks}


def _texts(inputs: Mapping[str, Array]) -> dict[str, Array]:
    texts = inputs["TEXT"]
    upper = [text.upper() for text in texts.reshape(-1)]
    return {
        "UPPER": np.array(upper, object).reshape(texts.shape),
        "PAIR": np.array([[text, b"!"] for text in upper], object),
    }


def _doubled(inputs: Mapping[str, Array]) -> dict[str, Array]:
    return {"DOUBLED": inputs["IMAGE"] * 2}


def _counted(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """As many boxes as the image says."""
    count = int(inputs["IMAGE"].max())
    return {"BOXES": np.full((count, 2), count, np.float32)}


MODELS = [
    FakeModel(
        "rows",
        inputs={"VALUES": ("FP32", (3,)), "MARKS": ("INT8", (2,), True)},
        outputs={"SUMS": ("FP32", (1,)), "MARKED": ("INT8", (2,))},
        run=_rows,
        max_batch_size=8,
    ),
    FakeModel(
        "texts",
        inputs={"TEXT": ("BYTES", (1,))},
        outputs={"UPPER": ("BYTES", (1,)), "PAIR": ("BYTES", (2,))},
        run=_texts,
        max_batch_size=8,
    ),
    FakeModel(
        "images",
        inputs={"IMAGE": ("FP32", (-1, -1))},
        outputs={"DOUBLED": ("FP32", (-1, -1))},
        run=_doubled,
        max_batch_size=4,
    ),
    FakeModel(
        "open",
        inputs={"IMAGE": ("FP32", (-1, 2))},
        outputs={"DOUBLED": ("FP32", (-1, 2))},
        run=_doubled,
    ),
    FakeModel(
        "single",
        inputs={"IMAGE": ("FP32", (1, 2))},
        outputs={"DOUBLED": ("FP32", (1, 2))},
        run=_doubled,
    ),
    FakeModel(
        "boxes",
        inputs={"IMAGE": ("FP32", (1, 2))},
        outputs={"BOXES": ("FP32", (-1, 2))},
        run=_counted,
    ),
    FakeModel(
        "summed",
        inputs={"IMAGE": ("FP32", (-1, 2))},
        outputs={"BOXES": ("FP32", (-1, 2))},
        run=_counted,
    ),
]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(MODELS) as server:
        yield server
        assert files_of(server) == []


@pytest.fixture(autouse=True)
def nothing_left(server: ScriptedServer) -> Iterator[None]:
    yield
    assert server.regions == {}


def ragged(*rows: Any) -> Array:
    array = np.empty(len(rows), object)
    for place, row in enumerate(rows):
        array[place] = row
    return array


def image(height: int, width: int, value: float) -> Array:
    return np.full((height, width), value, np.float32)


def requests_of(server: ScriptedServer) -> int:
    return sum(each.path.endswith("/infer") for each in server.requests)


# --- columns and rows -----------------------------------------------------------------


def test_outputs_are_added_to_the_columns_that_came(server: ScriptedServer) -> None:
    batch = {"VALUES": FEW, "path": np.array(["a", "b", "c", "d"])}
    with BatchInfer(server.url, "rows") as infer:
        result = infer(batch)
    assert list(result) == ["VALUES", "path", "SUMS", "MARKED"]
    assert result["path"] is batch["path"]
    assert result["SUMS"].tolist() == [[3], [12], [21], [30]]
    assert (result["MARKED"] == -1).all()


def test_columns_may_have_other_names_and_be_left_behind(
    server: ScriptedServer,
) -> None:
    marks = FEW[:, :2].astype(np.int8)
    batch = {"x": FEW, "mark": marks, "id": np.arange(4)}
    with BatchInfer(
        server.url,
        "rows",
        inputs={"VALUES": "x", "MARKS": "mark"},
        outputs={"MARKED": "seen"},
        keep=["id"],
    ) as infer:
        result = infer(batch)
    assert list(result) == ["id", "seen"]
    assert result["seen"].tolist() == marks.tolist()


@pytest.mark.parametrize(("batch_size", "requests"), [(None, 3), (5, 4), (1, 20)])
def test_more_rows_than_the_model_takes_become_several_requests(
    server: ScriptedServer, batch_size: int | None, requests: int
) -> None:
    values = np.random.default_rng(1).random((20, 3), np.float32)
    before = requests_of(server)
    with BatchInfer(
        server.url, "rows", outputs=["SUMS"], batch_size=batch_size, slots=2
    ) as infer:
        for _ in range(2):
            assert np.array_equal(
                infer({"VALUES": values})["SUMS"], values.sum(axis=1, keepdims=True)
            )
    assert requests_of(server) - before == 2 * requests


def test_as_many_requests_are_in_flight_as_there_are_slots(
    server: ScriptedServer,
) -> None:
    with (
        BatchInfer(server.url, "rows", slots=3, batch_size=1) as infer,
        ThreadPoolExecutor(1) as pool,
    ):
        with server.hold():
            result = pool.submit(infer, {"VALUES": FEW})
            server.wait_for(3)
        assert result.result(10.0)["SUMS"].tolist() == [[3], [12], [21], [30]]


def test_no_rows_give_no_rows(server: ScriptedServer) -> None:
    with BatchInfer(server.url, "rows") as infer:
        result = infer({"VALUES": FEW[:0]})
    assert result["SUMS"].shape == (0, 1)
    assert result["SUMS"].dtype == np.float32
    assert result["MARKED"].shape == (0, 2)
    with BatchInfer(server.url, "open") as infer:
        assert infer({"IMAGE": image(5, 2, 3)[:0]})["DOUBLED"].shape == (0, 2)


def test_results_are_no_views_of_shared_memory(server: ScriptedServer) -> None:
    with BatchInfer(server.url, "rows", slots=1) as infer:
        first = infer({"VALUES": FEW})
        infer({"VALUES": FEW * 0})
    assert first["SUMS"].tolist() == [[3], [12], [21], [30]]


def test_rows_of_unequal_shapes_keep_their_order(server: ScriptedServer) -> None:
    sizes = [(2, 3), (1, 1), (2, 3), (4, 2), (1, 1), (2, 3), (2, 3), (2, 3)]
    images = ragged(*(image(*size, place) for place, size in enumerate(sizes)))
    before = requests_of(server)
    with BatchInfer(server.url, "images") as infer:
        result = infer({"IMAGE": images})["DOUBLED"]
    assert [row.shape for row in result] == sizes
    assert [row.flat[0] for row in result] == [2 * place for place in range(8)]
    # Four of one size are all that the model takes at once: 5, 2 and 1 of them.
    assert requests_of(server) - before == 4


@pytest.mark.parametrize("as_lists", [False, True])
def test_rows_that_are_objects_of_one_shape_make_one_array(
    server: ScriptedServer, as_lists: bool
) -> None:
    rows = [image(2, 3, place) for place in range(3)]
    column = ragged(*([row.tolist() for row in rows] if as_lists else rows))
    with BatchInfer(server.url, "images", cast=as_lists) as infer:
        result = infer({"IMAGE": column})["DOUBLED"]
    assert result.dtype == np.float32
    assert np.array_equal(result, 2 * np.stack(rows))


@pytest.mark.parametrize(
    "column",
    [
        np.array(["ab", "ü", ""], object),
        np.array(["ab", "ü", ""]),
        np.array([b"ab", "ü".encode(), b""], object)[:, None],
        ["ab", "ü", ""],
        ragged(["ab"], ["ü"], [""]),
    ],
    ids=["objects", "text", "column of one", "list", "lists"],
)
def test_texts_are_one_for_each_row(server: ScriptedServer, column: Any) -> None:
    with BatchInfer(server.url, "texts", inputs={"TEXT": "t"}) as infer:
        result = infer({"t": column})
    assert result["UPPER"].tolist() == [b"AB", "ü".encode().upper(), b""]
    assert result["PAIR"].tolist()[0] == [b"AB", b"!"]


@pytest.mark.parametrize("column", [[1, 2], np.array([1, 2])])
def test_numbers_are_cast_only_if_wanted(server: ScriptedServer, column: Any) -> None:
    batch = {"VALUES": np.array([[1, 2, 3]])}
    with BatchInfer(server.url, "rows") as infer:
        with pytest.raises(TensorMismatch, match=r"column .VALUES.*FP32") as told:
            infer(batch)
        assert told.value.context["column"] == "VALUES"
    with BatchInfer(server.url, "rows", cast=True) as infer:
        assert infer(batch)["SUMS"].tolist() == [[6]]


# --- models without a batch dimension -------------------------------------------------


def test_a_first_dimension_that_is_open_takes_all_rows(server: ScriptedServer) -> None:
    before = requests_of(server)
    with BatchInfer(server.url, "open") as infer:
        assert (infer({"IMAGE": image(5, 2, 3)})["DOUBLED"] == 6).all()
        assert requests_of(server) - before == 1
        rows = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
        assert np.array_equal(infer({"IMAGE": rows})["DOUBLED"], 2 * rows)
        assert requests_of(server) - before == 3


def test_a_first_dimension_of_one_takes_a_row_each(server: ScriptedServer) -> None:
    before = requests_of(server)
    with BatchInfer(server.url, "single") as infer:
        result = infer({"IMAGE": FEW[:, :2].copy()})["DOUBLED"]
    assert np.array_equal(result, 2 * FEW[:, :2])
    assert requests_of(server) - before == 4


def test_a_row_may_have_any_number_of_results(server: ScriptedServer) -> None:
    counts = [2, 1, 3, 0, 2]
    images = np.repeat(np.array(counts, np.float32), 2).reshape(5, 2)
    with BatchInfer(server.url, "boxes") as infer:
        boxes = infer({"IMAGE": images})["BOXES"]
    assert [row.shape for row in boxes] == [(count, 2) for count in counts]
    assert all((row == count).all() for row, count in zip(boxes, counts, strict=True))


def test_outputs_that_do_not_tell_their_rows_are_refused(
    server: ScriptedServer,
) -> None:
    with (
        BatchInfer(server.url, "summed") as infer,
        pytest.raises(InferFailed, match=r"'BOXES' came with shape \[7, 2\] for 3 row"),
    ):
        infer({"IMAGE": image(3, 2, 7)})


# --- mistakes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "batch", "error", "words"),
    [
        ({}, {"x": FEW}, UsageError, "no column 'VALUES' that feeds input 'VALUES'"),
        ({"inputs": {"VALUE": "x"}}, {"x": FEW}, UnknownTensor, "no input 'VALUE'"),
        ({"inputs": {"MARKS": "m"}}, {"VALUES": FEW}, UsageError, "no column 'm'"),
        ({"outputs": ["SUM"]}, {"VALUES": FEW}, UnknownTensor, "'SUM'"),
        ({"keep": ["id"]}, {"VALUES": FEW}, UsageError, "'id' that is to be kept"),
        ({}, FEW, UsageError, 'batch_format="numpy"'),
        ({}, {"VALUES": FEW[:, :2]}, TensorMismatch, r"rows of shape \[2\].*VALUES"),
        (
            {},
            {"VALUES": FEW, "MARKS": np.zeros((3, 2), np.int8)},
            UsageError,
            r"column 'VALUES' has 4 rows, 'MARKS' has 3\. All columns",
        ),
        (
            {},
            {"VALUES": FEW, "path": ["a"] * 5, "id": [1] * 4},
            UsageError,
            r"column 'VALUES' has 4 rows, 'path' has 5\. All columns",
        ),
        (
            {"keep": ["path"]},
            {"VALUES": FEW[:0], "path": ["a", "b"]},
            UsageError,
            r"column 'VALUES' has 0 rows, 'path' has 2\. All columns",
        ),
        ({}, {"VALUES": FEW, "id": 7}, UsageError, "'id' is a int without a length"),
        ({"keep": ["id"]}, {"VALUES": FEW}, UsageError, "in keep=, or leave it out"),
    ],
)
def test_a_wrong_column_is_told_by_name(
    server: ScriptedServer,
    options: dict[str, Any],
    batch: Any,
    error: type[Exception],
    words: str,
) -> None:
    with (
        BatchInfer(server.url, "rows", **options) as infer,
        pytest.raises(error, match=words),
    ):
        infer(batch)


@pytest.mark.parametrize(
    "options", [{"batch_size": 0}, {"batch_size": 2.0}, {"keep": "id"}]
)
def test_options_that_cannot_be_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        BatchInfer("localhost:8000", "rows", **options)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ([0, 1, 2, 3], "rows 0 to 3"),
        ([4], "row 4"),
        ([5, 7], "rows 5, 7"),
        ([*range(5, 26, 2)], "rows 5, 7, 9, 11, 13, 15, 17, 19, …"),
    ],
)
def test_an_error_tells_of_which_rows_it_is(
    server: ScriptedServer, wrong: list[int], told: str
) -> None:
    # Rows of one shape make a request.
    images = [
        image(2, 2, row).astype(np.int32) if row in wrong else image(3, row + 3, row)
        for row in range(27)
    ]
    with (
        BatchInfer(server.url, "images", batch_size=30) as infer,
        pytest.raises(TensorMismatch, match="int32") as failed,
    ):
        infer({"IMAGE": ragged(*images)})
    assert failed.value.__notes__ == [f"This is what became of {told} of the batch."]


def test_after_an_error_the_next_batch_is_right(server: ScriptedServer) -> None:
    with BatchInfer(server.url, "rows", slots=1) as infer:
        for _ in range(3):
            with pytest.raises(TensorMismatch):
                infer({"VALUES": FEW[:, :2]})
        assert infer({"VALUES": FEW})["SUMS"].tolist() == [[3], [12], [21], [30]]


# --- life -----------------------------------------------------------------------------


def test_it_can_be_pickled_before_and_after_use(server: ScriptedServer) -> None:
    with BatchInfer(server.url, "rows", outputs=["SUMS"], keep=()) as infer:
        for _ in range(2):
            with pickle.loads(pickle.dumps(infer)) as again:
                assert "not open" in repr(again)
                result = again({"VALUES": FEW})
            assert list(result) == ["SUMS"]
            infer({"VALUES": FEW})
        assert "open" in repr(infer)


def test_a_function_tells_the_address_where_it_is_called(
    server: ScriptedServer,
) -> None:
    asked = []

    def url() -> str:
        asked.append(True)
        return server.url

    with BatchInfer(url, "rows") as infer:
        assert asked == []
        infer({"VALUES": FEW})
        infer({"VALUES": FEW})
    assert asked == [True]


def test_it_opens_again_after_close(server: ScriptedServer) -> None:
    with BatchInfer(server.url, "rows") as infer:
        infer({"VALUES": FEW})
        infer.close()
        assert server.regions == {}
        assert infer({"VALUES": FEW})["SUMS"].shape == (4, 1)


def test_after_its_block_it_refuses_until_the_next_block(
    server: ScriptedServer,
) -> None:
    with BatchInfer(server.url, "rows") as infer:
        infer({"VALUES": FEW})
    with pytest.raises(PoolClosed, match="closed at the end of its `with` block"):
        infer({"VALUES": FEW})
    assert server.regions == {}
    assert "closed" in repr(infer)
    with infer:
        assert infer({"VALUES": FEW})["SUMS"].shape == (4, 1)


def test_dropping_it_closes_its_session(server: ScriptedServer) -> None:
    infer = BatchInfer(server.url, "rows")
    infer({"VALUES": FEW})
    assert server.regions
    del infer
    assert server.regions == {}
