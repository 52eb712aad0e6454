"""A program that uses Ray Data; see test_ray_data.py.

    python ray_program.py URL FOLDER

Carries out all scenarios, for Ray takes seconds to start, and puts what each got into
a JSON file of its name, or the error. Refuses to start servers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import ray

import shmlane

ROWS = 200
ACTORS = 2


class Marked(shmlane.BatchInfer):
    """Tells who did it."""

    def __call__(self, batch: Any) -> Any:
        rows = super().__call__(batch)
        return rows | {"pid": np.full(len(batch["id"]), os.getpid())}


class Dying(shmlane.BatchInfer):
    """An actor that is killed in the middle of its work, once."""

    def __init__(self, url: str, model: str, mark: str, **options: Any) -> None:
        super().__init__(url, model, **options)
        self.mark = mark

    def __call__(self, batch: Any) -> Any:
        rows = super().__call__(batch)
        with contextlib.suppress(FileExistsError):
            Path(self.mark).touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
        return rows


def infer(dataset: Any, infer: type, url: str, model: str, **options: Any) -> Any:
    return dataset.map_batches(
        infer,
        fn_constructor_kwargs={"url": url, "model": model, **options},
        batch_format="numpy",
        # Several requests each: the model takes 8 rows.
        batch_size=25,
        compute=ray.data.ActorPoolStrategy(size=ACTORS),
        num_cpus=0.1,
    ).take_all()


def values(url: str, folder: str) -> Any:
    items = [{"id": id, "VALUES": _values(id)} for id in range(ROWS)]
    dataset = ray.data.from_items(items, override_num_blocks=8)
    return infer(dataset, Marked, url, "rows", keep=["id"])


def killed(url: str, folder: str) -> Any:
    items = [{"id": id, "VALUES": _values(id)} for id in range(ROWS)]
    dataset = ray.data.from_items(items, override_num_blocks=8)
    mark = f"{folder}/killed"
    rows = infer(dataset, Dying, url, "rows", keep=["id"], mark=mark)
    assert Path(mark).exists()
    return rows


def _values(id: int) -> Any:
    return np.array([id, id / 2, 1], np.float32)


def texts(url: str, folder: str) -> Any:
    items = [
        {"id": id, "n": np.full(4, id, np.int32), "w": [f"w{id}", "ü" * (id % 3)]}
        for id in range(ROWS)
    ]
    dataset = ray.data.from_items(items, override_num_blocks=4)
    inputs = {"NUMBERS": "n", "WORDS": "w"}
    return infer(dataset, shmlane.BatchInfer, url, "mixed", inputs=inputs, keep=["id"])


def lengths(url: str, folder: str) -> Any:
    """Each row has a result of another length, none among them."""
    items = [
        {"id": id, "ORDER": np.array([id, id % 4, 0], np.int32)} for id in range(50)
    ]
    dataset = ray.data.from_items(items, override_num_blocks=4)
    return infer(dataset, shmlane.BatchInfer, url, "moody", keep=["id"])


def wrong(url: str, folder: str) -> Any:
    dataset = ray.data.from_items([{"id": 1}])
    try:
        infer(dataset, shmlane.BatchInfer, url, "rows")
    except Exception as error:
        return str(error)
    return "no error"


def plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def main() -> None:
    url, folder = sys.argv[1:]
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    for scenario in (values, killed, texts, lengths, wrong):
        try:
            got = scenario(url, folder)
        except Exception:
            got = traceback.format_exc()
        path = Path(folder, f"{scenario.__name__}.json")
        path.write_text(json.dumps(got, default=plain))


if __name__ == "__main__":
    main()
