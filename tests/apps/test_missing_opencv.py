"""Examples that work on pictures, where OpenCV is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("cv2", reason="needs the extra [preprocess]")

from examples import ocr
from examples.video import video


@pytest.mark.parametrize("program", [ocr.__file__, video.__file__])
def test_without_opencv_it_says_how_to_get_it(program: str) -> None:
    start = "import runpy, sys; sys.modules['cv2'] = None; runpy.run_path(sys.argv[1])"
    done = subprocess.run(
        (sys.executable, "-c", start, program),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    (told,) = done.stderr.splitlines()
    assert told.endswith("pip install 'shmlane[preprocess]'")
