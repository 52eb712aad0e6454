"""Boxes from probability maps whose right answer is known because it was drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("cv2", reason="needs the extra [preprocess]")

import cv2

from shmlane.demo.textboxes import TextBox, find_text_boxes
from shmlane.errors import TensorMismatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Map = NDArray[np.float32]


def empty_map() -> Map:
    return np.zeros((120, 240), np.float32)


def bar(
    x: float, y: float, width: float, height: float, *, angle: float = 0.0
) -> NDArray[np.int32]:
    """Corners of a rectangle around (x, y), in whole pixels."""
    return cv2.boxPoints(((x, y), (width, height), angle)).round().astype(np.int32)


def draw(probability: Map, corners: NDArray[np.int32], value: float) -> None:
    cv2.fillPoly(probability, [corners], [value])


def sides(box: TextBox) -> tuple[float, float]:
    """Longer and shorter side."""
    first = float(np.linalg.norm(box.corners[1] - box.corners[0]))
    second = float(np.linalg.norm(box.corners[2] - box.corners[1]))
    return max(first, second), min(first, second)


def test_an_empty_map_has_no_boxes() -> None:
    assert find_text_boxes(empty_map()) == []


def test_a_core_grows_by_its_area_over_its_perimeter() -> None:
    probability = empty_map()
    probability[50:61, 40:141] = 0.9
    (box,) = find_text_boxes(probability, expand=1.6)
    distance = 100 * 10 * 1.6 / (2 * (100 + 10))
    assert sides(box) == pytest.approx((100 + 2 * distance, 10 + 2 * distance))
    assert box.centre == pytest.approx((90, 55))


def test_the_score_is_the_mean_inside_the_core_alone() -> None:
    probability = empty_map()
    probability[50:61, 40:141] = 0.8
    probability[50:61, 40:90] = 0.6
    (box,) = find_text_boxes(probability)
    assert box.score == pytest.approx((50 * 0.6 + 51 * 0.8) / 101)


def test_a_slanted_core_gets_a_slanted_box() -> None:
    probability = empty_map()
    draw(probability, bar(120, 60, 100, 12, angle=25), 0.9)
    (box,) = find_text_boxes(probability, expand=0.0)
    longest = max(
        (box.corners[i] - box.corners[i - 1] for i in range(4)), key=np.linalg.norm
    )
    angle = np.degrees(np.arctan2(longest[1], longest[0])) % 180
    assert angle == pytest.approx(25, abs=1.5)
    assert sides(box) == pytest.approx((100, 12), abs=2)


@pytest.mark.parametrize("angle", [-80, -30, -1, 0, 1, 30, 80])
def test_corners_go_clockwise_from_the_upper_left_one(angle: float) -> None:
    probability = empty_map()
    draw(probability, bar(120, 60, 60, 20, angle=angle), 0.9)
    (box,) = find_text_boxes(probability)
    upper_left, upper_right, lower_right, lower_left = box.corners
    assert upper_left[0] < upper_right[0]
    assert lower_left[0] < lower_right[0]
    assert upper_left[1] < lower_left[1]
    assert upper_right[1] < lower_right[1]


def test_a_weak_core_is_dropped_by_its_score() -> None:
    probability = empty_map()
    probability[20:31, 40:141] = 0.4
    probability[80:91, 40:141] = 0.7
    (box,) = find_text_boxes(probability, threshold=0.3, min_score=0.5)
    assert box.centre[1] == pytest.approx(85)


def test_a_core_thinner_than_the_shortest_side_is_dropped() -> None:
    probability = empty_map()
    probability[50:52, 40:141] = 0.9
    assert find_text_boxes(probability, min_side=3.0) == []
    assert len(find_text_boxes(probability, min_side=1.0)) == 1


def test_values_under_the_threshold_do_not_join_two_cores() -> None:
    probability = empty_map()
    probability[50:61, 20:220] = 0.2
    probability[50:61, 20:100] = probability[50:61, 140:220] = 0.9
    assert len(find_text_boxes(probability, threshold=0.3)) == 2


def test_boxes_come_from_top_to_bottom() -> None:
    probability = empty_map()
    for top in (90, 10, 50):
        probability[top : top + 8, 40:141] = 0.9
    heights = [box.centre[1] for box in find_text_boxes(probability)]
    assert heights == sorted(heights)
    assert len(heights) == 3


def test_a_hole_in_a_core_is_no_box_of_its_own() -> None:
    probability = empty_map()
    probability[20:100, 40:200] = 0.9
    probability[40:80, 80:160] = 0.0
    assert len(find_text_boxes(probability)) == 1


def test_a_core_at_the_edge_is_found() -> None:
    probability = empty_map()
    probability[110:, 200:] = 0.9
    (box,) = find_text_boxes(probability, expand=0.0)
    assert box.corners.max(axis=0).tolist() == [239, 119]


def test_a_scaled_box_stands_on_the_larger_picture() -> None:
    box = TextBox(np.array([[1, 2], [3, 2], [3, 4], [1, 4]], np.float32), 0.9)
    larger = box.scaled(2.0, 10.0)
    assert larger.centre == (4.0, 30.0)
    assert larger.score == box.score


def test_a_map_with_a_batch_dimension_is_refused() -> None:
    with pytest.raises(TensorMismatch, match="2 dimensions, this one 3"):
        find_text_boxes(np.zeros((1, 8, 8), np.float32))
