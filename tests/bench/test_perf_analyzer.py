"""What is made of one perf_analyzer run: its export, the CPU readings, the blocks."""

from __future__ import annotations

import numpy as np
import pytest

from shmlane.bench.perf_analyzer import Pilot, Run, best_of, make_sample
from shmlane.bench.server_stats import Count

MS = 1_000_000
RIGHT = b"\x01\x02\x03\x04"


def run_of(
    *,
    requests: int = 12,
    cpu: list[tuple[int, int]] | None = None,
    sent: bytes = RIGHT,
    received: bytes = RIGHT,
) -> Run:
    """A request every 10 ms that takes 5 ms; the first two take twice as long."""
    starts = np.arange(requests, dtype=np.int64) * 10 * MS
    ends = starts + 5 * MS
    ends[:2] += 5 * MS
    return Run(starts, ends, cpu or [], sent, received)


def counted(inferences: int = 12, *, failures: int = 0) -> Count:
    return Count(inferences, failures, inferences * 3000)


def test_the_first_requests_only_warm_up() -> None:
    sample = make_sample(run_of(), counted(), settle=2)
    assert (sample.p50_us, sample.p99_us) == (5000.0, 5000.0)
    assert sample.server_us == pytest.approx(3.0)
    # Ten requests from the start of the third to the end of the last.
    assert sample.requests_per_s == pytest.approx(10 / 0.095)
    assert sample.note == ""


def test_the_server_counts_the_requests_and_the_export_only_times_them() -> None:
    sample = make_sample(run_of(), counted(6), settle=2)
    assert sample.requests_per_s == pytest.approx(5 / 0.095)
    assert sample.note == "exported 12, the server counted 6"


def test_cpu_before_and_after_the_traffic_does_not_count() -> None:
    start_up, export = 100 * MS, 900 * MS
    cpu = [
        (-10 * MS, 0),
        (22 * MS, start_up),
        (62 * MS, start_up + 8 * MS),
        (400 * MS, export),
    ]
    sample = make_sample(run_of(cpu=cpu), counted(), settle=2)
    # Between the two readings inside, the replies at 25, 35, 45 and 55 ms came.
    assert sample.client_cpu_us == pytest.approx(2000.0)


@pytest.mark.parametrize("cpu", [[], [(30 * MS, 5)], [(30 * MS, 5), (31 * MS, 6)]])
def test_cpu_is_unknown_without_readings_around_a_reply(
    cpu: list[tuple[int, int]],
) -> None:
    assert make_sample(run_of(cpu=cpu), counted(), settle=2).client_cpu_us is None


def test_a_wrong_output_block_is_not_verified() -> None:
    right = make_sample(run_of(), counted(), settle=2)
    wrong = make_sample(run_of(received=b"\x01\x02\x03\x05"), counted(), settle=2)
    assert (right.verified, wrong.verified) == (True, False)


@pytest.mark.parametrize(
    ("sent", "received"), [(b"", RIGHT), (RIGHT, b""), (bytes(4), bytes(4))]
)
def test_blocks_that_prove_nothing_are_neither_right_nor_wrong(
    sent: bytes, received: bytes
) -> None:
    run = run_of(sent=sent, received=received)
    assert make_sample(run, counted(), settle=2).verified is None


def test_a_failed_request_is_not_verified_and_noted() -> None:
    sample = make_sample(run_of(), counted(failures=1), settle=2)
    assert sample.verified is False
    assert "1 requests failed" in sample.note


@pytest.mark.parametrize(
    ("concurrency", "expected"), [(1, "--sync"), (2, "--async"), (64, "--async")]
)
def test_the_better_mode_has_the_lower_latency_or_for_several_the_higher_pace(
    concurrency: int, expected: str
) -> None:
    pilots = [Pilot("--sync", 50.0, 9000.0), Pilot("--async", 60.0, 9500.0)]
    assert best_of(pilots, concurrency).mode == expected
    assert best_of(pilots[::-1], concurrency).mode == expected
