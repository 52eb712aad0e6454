"""How much memory `shmlane.preprocess` takes beside the view, and how much it keeps."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from shmlane.preprocess import image_into, letterbox_into, resize_into
from tests.unit.preprocessing import BACKENDS, MEAN, STD, backend, empty_view, picture

SIZE = (640, 640)
# A plane of the view has 1.6 MB, the frame 1.2 MB.
LITTLE = 200_000


@pytest.fixture(params=BACKENDS, autouse=True)
def chosen_backend(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    with backend(request.param, monkeypatch):
        yield request.param


def traced(call: Callable[[], object]) -> tuple[int, int]:
    """Bytes that a call leaves behind, and most of them while it ran."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("view_dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("frame_dtype", ["uint8", "float32"])
@pytest.mark.parametrize("swap_rb", [False, True])
def test_a_second_frame_needs_hardly_any_memory(
    layout: str, view_dtype: str, frame_dtype: str, swap_rb: bool
) -> None:
    frame = picture(*SIZE, 3, dtype=frame_dtype)
    view = empty_view(SIZE, 3, layout, view_dtype)

    def write() -> None:
        image_into(view, frame, mean=MEAN, std=STD, swap_rb=swap_rb)

    write()
    left, most = traced(write)
    assert left < 10_000
    assert most < LITTLE


def test_a_second_resized_frame_needs_no_picture_of_its_own(
    chosen_backend: str,
) -> None:
    frame = picture(720, 1280, 3)
    view = empty_view(SIZE, 3, "nchw")
    letterbox_into(view, frame)
    left, most = traced(lambda: letterbox_into(view, frame))
    assert left < 10_000
    # Without OpenCV the rows of a block are gathered, twice, and made bytes.
    assert most < (LITTLE if chosen_backend == "opencv" else 600_000)


def test_a_large_frame_leaves_no_large_memory_behind() -> None:
    view = empty_view((2000, 2500), 3, "nchw", "u1")
    frame = picture(500, 400, 3)
    left, most = traced(lambda: resize_into(view, frame))
    assert left < 8 << 20
    assert most < 24 << 20


def test_what_a_thread_kept_goes_with_it() -> None:
    frame = picture(720, 1280, 3)
    view = empty_view(SIZE, 3, "nchw", "f2")

    def work_elsewhere() -> None:
        thread = threading.Thread(target=resize_into, args=(view, frame))
        thread.start()
        thread.join(30)

    left, most = traced(work_elsewhere)
    assert most > 1_000_000
    assert left < LITTLE
