"""A model that writes some of its replies long after it has read the request.

Owns building it from the demo models' backend. Only such a model shows a slot that is
used again too early: one that copies in an instant copies what is there by then.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import shmlane.server
from tests.chaos.lanes import SLOW

_HERE = Path(__file__).with_name("native")
_ECHO = Path(shmlane.server.__file__).with_name("native") / "echo.c"
_CONFIG = f"""\
name: "{SLOW}"
backend: "chaos_slow"
max_batch_size: 0
input [{{ name: "INPUT__0" data_type: TYPE_FP32 dims: [ -1, -1, -1, -1 ] }}]
output [{{ name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ -1, -1, -1, -1 ] }}]
instance_group [{{ kind: KIND_CPU count: 4 }}]
"""


def build(repository: Path) -> Path:
    """Make a repository with this model. Skips the test where no C compiler is."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("the slow model needs a C compiler")
    model = repository / SLOW
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(_CONFIG)
    flags = ["-O2", "-fPIC", "-shared", "-std=gnu11"]
    flags += ["-include", str(_HERE / "slow.h")]
    library = model / "libtriton_chaos_slow.so"
    subprocess.run([compiler, *flags, str(_ECHO), "-o", str(library)], check=True)
    return repository
