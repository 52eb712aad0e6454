"""What is measured: names, filters, and how many rounds fit."""

from __future__ import annotations

import pytest

from shmlane.bench import CONTENDERS, PAYLOADS, WIRE, find_case, make_plan
from shmlane.errors import UsageError


def test_a_plan_without_filters_is_the_whole_matrix() -> None:
    plan = make_plan()
    assert len(plan.contenders) == 6
    assert [cell.concurrency for cell in plan.cells()] == [1, 4, 16] * 3
    assert [cell.payload.name for cell in plan.cells()[::3]] == list(PAYLOADS)
    assert not any(cell.fill for cell in plan.cells())


def test_the_wire_case_compares_the_clients_without_shared_memory() -> None:
    plan = make_plan(defaults=WIRE)
    assert [each.name for each in plan.contenders] == [
        "shmlane-wire",
        "tritonclient-http-wire",
        "tritonclient-grpc-wire",
    ]
    assert [str(cell) for cell in plan.cells()] == ["yolov8 x1"]
    wider = make_plan(defaults=WIRE, concurrency=[1, 16], contenders=["cpp-http"])
    assert [str(cell) for cell in wider.cells()] == ["yolov8 x1", "yolov8 x16"]
    assert [each.name for each in wider.contenders] == ["cpp-http"]


def test_many_requests_are_compared_with_both_cpp_clients() -> None:
    plan = make_plan(defaults=find_case("many").defaults)
    assert [str(cell) for cell in plan.cells()] == ["yolov8 x16", "yolov8 x64"]
    flows = {each.name: each.flow for each in plan.contenders}
    assert flows == {
        "shmlane-stream": "stream",
        "shmlane-async": "tasks",
        "shmlane-http": "threads",
        "cpp-http": "threads",
        "cpp-grpc": "threads",
    }


def test_no_client_without_shared_memory_is_measured_unasked() -> None:
    for plan in (make_plan(), make_plan(quick=True)):
        assert {each.memory for each in plan.contenders} == {"system"}


def test_filters_keep_what_they_name_in_the_order_named() -> None:
    plan = make_plan(
        contenders=["cpp-grpc", "shmlane-http", "cpp-grpc"],
        payloads=["yolov8"],
        concurrency=[16, 1],
        fill=True,
    )
    assert [each.name for each in plan.contenders] == ["cpp-grpc", "shmlane-http"]
    assert [str(cell) for cell in plan.cells()] == [
        "yolov8 x1, filled",
        "yolov8 x16, filled",
    ]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="'cpp-htp'") as caught:
        make_plan(contenders=["cpp-htp"])
    assert all(name in caught.value.hint for name in CONTENDERS)
    with pytest.raises(UsageError, match="'huge'") as caught:
        make_plan(payloads=["tiny", "huge"])
    assert all(name in caught.value.hint for name in PAYLOADS)


@pytest.mark.parametrize("values", [[], [0], [1, 65], [-4]])
def test_a_concurrency_that_cannot_be_measured_is_refused(values: list[int]) -> None:
    with pytest.raises(UsageError, match="1 to 64"):
        make_plan(concurrency=values)


def test_zero_rounds_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        make_plan(rounds=0)


def test_fifteen_rounds_unless_quick_has_to_do_with_fewer() -> None:
    assert make_plan().rounds == 15
    narrow = make_plan(
        quick=True, contenders=["shmlane-http"], payloads=["tiny"], concurrency=[1]
    )
    assert narrow.rounds == 15
    assert 3 <= make_plan(quick=True).rounds < 15
    assert make_plan(quick=True, rounds=7).rounds == 7


def test_the_whole_quick_matrix_takes_about_two_minutes() -> None:
    assert make_plan(quick=True).expected_s < 150


def test_a_seed_is_drawn_unless_given() -> None:
    assert make_plan(seed=7).seed == 7
    assert len({make_plan().seed for _ in range(8)}) > 1


def test_no_two_contenders_measure_the_same_thing() -> None:
    kinds = {(c.program, c.endpoint, c.way, c.flow) for c in CONTENDERS.values()}
    assert len(kinds) == len(CONTENDERS)
