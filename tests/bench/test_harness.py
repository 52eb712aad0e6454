"""The loop that times contenders, with clients that answer at once."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from shmlane.bench.workers.harness import (
    Lanes,
    Spec,
    measure,
    percentiles_us,
    prepare,
)


class FakeLane:
    """Answers right, but for every `wrong_every`th request."""

    def __init__(self, wrong_every: int) -> None:
        self.wrong_every = wrong_every
        self.markers: list[float] = []
        self.threads = {threading.get_ident()}
        self.log = ["made"]

    def prepare(self) -> None:
        self.log.append("prepared")

    def call(self, marker: float) -> bool:
        self.threads.add(threading.get_ident())
        self.markers.append(marker)
        return bool(len(self.markers) % self.wrong_every)

    def close(self) -> None:
        self.log.append("closed")


class FakeClient:
    def __init__(self, *, wrong_every: int = 1 << 30) -> None:
        self.wrong_every = wrong_every
        self.lanes: dict[int, FakeLane] = {}

    def lane(self, index: int) -> FakeLane:
        lane = self.lanes[index] = FakeLane(self.wrong_every)
        return lane


@pytest.mark.parametrize("concurrency", [1, 4])
def test_every_request_of_every_lane_is_counted(concurrency: int) -> None:
    client = FakeClient()
    lanes = Lanes(client.lane, concurrency)
    turn = measure(lanes, 0.02)
    lanes.close()
    assert turn["requests"] == sum(len(lane.markers) for lane in client.lanes.values())
    assert turn["wrong"] == 0
    assert turn["ended_ns"] > turn["began_ns"]
    assert turn["p50_us"] <= turn["p90_us"] <= turn["p99_us"]


def test_wrong_replies_are_counted() -> None:
    client = FakeClient(wrong_every=10)
    lanes = Lanes(client.lane, 1)
    turn = measure(lanes, 0.01)
    lanes.close()
    assert turn["wrong"] == turn["requests"] // 10 > 0


def test_lanes_never_send_the_same_value_at_once() -> None:
    client = FakeClient()
    lanes = Lanes(client.lane, 3)
    measure(lanes, 0.02)
    lanes.close()
    sent = [set(lane.markers) for lane in client.lanes.values()]
    assert not sent[0] & sent[1]
    assert not sent[1] & sent[2]
    assert all(np.float32(max(markers)) == max(markers) for markers in sent)


def test_a_lane_lives_in_one_thread_from_start_to_end() -> None:
    client = FakeClient()
    lanes = Lanes(client.lane, 3)
    for _ in range(2):
        prepare(lanes, 0.001)
        measure(lanes, 0.005)
    lanes.close()
    threads = [lane.threads for lane in client.lanes.values()]
    assert all(len(each) == 1 for each in threads)
    assert len(set.union(*threads)) == 3
    assert all(
        lane.log == ["made", "prepared", "prepared", "closed"]
        for lane in client.lanes.values()
    )


def test_percentiles_are_those_of_all_requests_in_microseconds() -> None:
    found = percentiles_us(np.arange(0, 101_000, 1000))
    assert found == {"p50_us": 50.0, "p90_us": 90.0, "p99_us": 99.0}


def test_the_last_element_is_found_whatever_the_rank() -> None:
    spec = Spec("x", "u", "sink", (1, 2, 3), 1, False, "in place", "threads")
    source = spec.source()
    source[spec.last] = 9.0
    assert source.reshape(-1)[-1] == 9.0
