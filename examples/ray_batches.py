"""Classify many pictures with Ray Data: actors share the work, Triton runs the network.

    python examples/ray_batches.py                       # starts a server of its own
    python examples/ray_batches.py --url localhost:8000 --pictures 2000 --actors 4

Owns a pipeline of three stages: pictures are drawn, made into what ResNet-50 takes, and
sent by `shmlane.BatchInfer`, of which each actor has one. Without --url it starts a
tritonserver with the network, which is downloaded on first use; `shmlane serve --demo
resnet50` serves it too. On a cluster every node has a Triton of its own, and
`localhost:8000` is the one beside the actor. The weights are random: the classes mean
nothing, but each picture has its own.

Needs Ray: pip install 'ray[data]'
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import shmlane
from shmlane.preprocess import image_into, stack_into
from shmlane.server import TritonServer, demo_models

Array = NDArray[Any]
Batch = dict[str, Array]

SIDE = 224
PIXELS, CLASSES = "gpu_0/data_0", "gpu_0/softmax_1"


def draw(number: int) -> Array:
    """A picture as a camera has it: height, width and three colours of 8 bits."""
    colours = np.random.default_rng(number).integers(0, 256, (7, 7, 3), np.uint8)
    return np.repeat(np.repeat(colours, SIDE // 7, axis=0), SIDE // 7, axis=1)


def drawn(batch: Batch) -> Batch:
    """The stage that would read files."""
    return {"id": batch["id"], "picture": np.stack([draw(id) for id in batch["id"]])}


def as_pixels(batch: Batch) -> Batch:
    """What the network takes: colours first, as numbers from 0 to 1."""
    pixels = np.empty((len(batch["id"]), 3, SIDE, SIDE), np.float32)
    stack_into(pixels, list(batch["picture"]), write=image_into)
    return {"id": batch["id"], "pixels": pixels}


def best(batch: Batch) -> Batch:
    """The likeliest class of each picture."""
    scores = batch["scores"]
    return {
        "id": batch["id"],
        "class": scores.argmax(axis=1),
        "score": scores.max(axis=1),
    }


def classify(url: str, pictures: int, *, actors: int) -> list[dict[str, Any]]:
    """One row for each picture, in their order."""
    import ray

    rows: list[dict[str, Any]] = (
        ray.data.range(pictures, override_num_blocks=4 * actors)
        .map_batches(drawn, batch_format="numpy")
        .map_batches(as_pixels, batch_format="numpy")
        .map_batches(
            shmlane.BatchInfer,
            fn_constructor_kwargs={
                "url": url,
                "model": "resnet50",
                "inputs": {PIXELS: "pixels"},
                "outputs": {CLASSES: "scores"},
                # Pixels have done their work, and are most of what would be carried on.
                "keep": ["id"],
            },
            batch_format="numpy",
            batch_size=32,
            compute=ray.data.ActorPoolStrategy(size=actors),
            # An actor waits for Triton most of its time, and must leave cores to the
            # stages before it.
            num_cpus=0.1,
        )
        .map_batches(best, batch_format="numpy")
        .sort("id")
        .take_all()
    )
    return rows


@contextlib.contextmanager
def server(url: str | None) -> Iterator[str]:
    """The server to ask: the one at `url`, or one that lives as long as the block."""
    if url:
        yield url
        return
    with TritonServer(demo_models("resnet50")) as own:
        yield own.http_url


def main(argv: Sequence[str] | None = None) -> None:
    """Classify as many pictures as asked for."""
    parser = argparse.ArgumentParser(description="Classify pictures with Ray Data.")
    parser.add_argument("--url", help="of a server with resnet50, on each node")
    parser.add_argument("--pictures", type=int, default=64, help="how many: 64")
    parser.add_argument("--actors", type=int, default=2, help="how many: 2")
    parser.add_argument("--json", action="store_true", help="for programs")
    asked = parser.parse_args(argv)
    with server(asked.url) as url:
        begun = time.monotonic()
        rows = classify(url, asked.pictures, actors=asked.actors)
        seconds = time.monotonic() - begun
    if asked.json:
        sys.stdout.write(f"{json.dumps(rows)}\n")
        return
    for row in rows[:5]:
        sys.stdout.write(
            f"picture {row['id']}: class {row['class']}, score {row['score']:.3f}\n"
        )
    sys.stdout.write(f"{len(rows)} pictures in {seconds:.1f} s with Ray's start\n")


if __name__ == "__main__":
    main()
