"""Counts of inferences per model, as Triton's statistics tell them.

Owns the numbers behind `GET /v2/models/stats`. Refuses to decide what a success is.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from .models import FakeModel


class ModelCounters:
    """The inferences of one model since its server started. Thread-safe."""

    def __init__(self, model: FakeModel) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._successes = 0
        self._failures = 0
        self._success_ns = 0
        self._failure_ns = 0
        self._last_ms = 0

    def count(self, *, succeeded: bool, duration_ns: int) -> None:
        """One request that the model has run."""
        with self._lock:
            self._last_ms = time.time_ns() // 1_000_000
            if succeeded:
                self._successes += 1
                self._success_ns += duration_ns
            else:
                self._failures += 1
                self._failure_ns += duration_ns

    def as_json(self, version: str) -> dict[str, Any]:
        """The entry of one version; all inferences count for the latest."""
        with self._lock:
            success = {"count": self._successes, "ns": self._success_ns}
            fail = {"count": self._failures, "ns": self._failure_ns}
            last = self._last_ms
        runs = success["count"] + fail["count"]
        nothing = {"count": 0, "ns": 0}
        return {
            "name": self._model.name,
            "version": version,
            "last_inference": last,
            "inference_count": success["count"],
            "execution_count": runs,
            "inference_stats": {
                "success": success,
                "fail": fail,
                "queue": {"count": success["count"], "ns": 0},
                "compute_input": {"count": success["count"], "ns": 0},
                "compute_infer": success,
                "compute_output": {"count": success["count"], "ns": 0},
                "cache_hit": nothing,
                "cache_miss": nothing,
            },
            "response_stats": {},
            "batch_stats": [_batch(runs, success["ns"] + fail["ns"])] if runs else [],
            "memory_usage": [],
        }


def _batch(runs: int, duration_ns: int) -> dict[str, Any]:
    return {
        "batch_size": 1,
        "compute_input": {"count": runs, "ns": 0},
        "compute_infer": {"count": runs, "ns": duration_ns},
        "compute_output": {"count": runs, "ns": 0},
    }
