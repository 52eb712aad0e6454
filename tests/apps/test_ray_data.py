"""Ray Data maps its batches through a real server, with an actor on each core.

Every row is compared with what the model makes of it, also where an actor is killed;
what that one leaves is removed by whoever comes next.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import ray_batches
from shmlane import Session
from shmlane.inventory import clean_up, list_regions
from shmlane.server import TritonServer, demo_models
from tests.sessions import registered, write_models
from tests.tensor_models import write_tensor_models

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="needs the group apps"
    ),
]

ROOT = Path(__file__).resolve().parents[2]
PICTURES = 20


@pytest.fixture(scope="module")
def ray_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """`rows`, `moody`, `mixed` and `resnet50`."""
    folder = tmp_path_factory.mktemp("ray")
    models = write_models(folder / "sessions", "rows", "moody")
    mixed = write_tensor_models(folder / "tensors") / "mixed"
    mixed.rename(models / "mixed")
    with TritonServer([models, *demo_models("resnet50")]) as server:
        yield server
        nothing_left(server)


def nothing_left(server: TritonServer) -> None:
    """An actor that Ray killed leaves its memory to the next who asks this server."""
    clean_up(only=server.http_url)
    assert registered(server) == set()
    left = [each.name for each in list_regions() if each.server == server.http_url]
    assert left == []


def run(*command: str | Path) -> str:
    """What a program of Ray's prints."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        # Without it, Ray looks for a token of its user's.
        env={**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_DEDUP_LOGS": "0"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def got(
    ray_server: TritonServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What each scenario of the program got, or its error as text."""
    folder = tmp_path_factory.mktemp("got")
    run(Path(__file__).with_name("ray_program.py"), ray_server.http_url, folder)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def by_id(rows: Any, count: int) -> list[dict[str, Any]]:
    """Each row once, in the order of their ids."""
    assert isinstance(rows, list), rows
    ordered: list[dict[str, Any]] = sorted(rows, key=lambda row: int(row["id"]))
    assert [row["id"] for row in ordered] == list(range(count))
    return ordered


def test_every_row_has_its_own_values_whichever_actor_made_them(
    got: dict[str, Any],
) -> None:
    rows = by_id(got["values"], 200)
    for id, row in enumerate(rows):
        assert row["SUMS"] == [id * 1.5 + 1]
        assert row["MARKED"] == [-1, -1]
    assert len({row["pid"] for row in rows}) == 2


def test_an_actor_that_is_killed_costs_no_row_and_leaves_nothing_for_good(
    got: dict[str, Any], ray_server: TritonServer
) -> None:
    rows = by_id(got["killed"], 200)
    assert all(row["SUMS"] == [id * 1.5 + 1] for id, row in enumerate(rows))
    with Session(ray_server.http_url, "rows"):
        own = [each for each in list_regions() if each.server == ray_server.http_url]
        assert [each.pid for each in own] == [os.getpid()]
    nothing_left(ray_server)


def test_texts_and_lists_go_there_and_back(got: dict[str, Any]) -> None:
    rows = by_id(got["texts"], 200)
    for id, row in enumerate(rows):
        assert row["TOTALS"] == [4 * id]
        assert row["FLIPPED"] == [True, True]
        words = (f"w{id}", "ü" * (id % 3))
        backwards = [word.encode()[::-1].decode("latin-1") for word in words]
        assert row["BACKWARDS"] == backwards


def test_results_of_any_length_are_rows_too(got: dict[str, Any]) -> None:
    rows = by_id(got["lengths"], 50)
    assert [row["REPLY"] for row in rows] == [[id] * (id % 4) for id in range(50)]


def test_a_wrong_column_is_told_where_the_pipeline_was_written(
    got: dict[str, Any],
) -> None:
    told = "the batch has no column 'VALUES' that feeds input 'VALUES'"
    assert told in got["wrong"]


def test_the_example_classifies_as_a_session_does(ray_server: TritonServer) -> None:
    options = ["--url", ray_server.http_url, "--pictures", f"{PICTURES}", "--json"]
    rows = json.loads(run("examples/ray_batches.py", *options))
    batch = {"id": np.arange(PICTURES)}
    pixels = ray_batches.as_pixels(ray_batches.drawn(batch))["pixels"]
    with Session(ray_server.http_url, "resnet50", slots=1) as session:
        for id, row in enumerate(by_id(rows, PICTURES)):
            outputs = session.infer({ray_batches.PIXELS: pixels[id : id + 1]})
            (scores,) = outputs[ray_batches.CLASSES]
            assert row["class"] == scores.argmax()
            assert row["score"] == pytest.approx(scores.max(), rel=1e-4)
