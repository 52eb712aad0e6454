"""How the suite runs: one seed for all that is random, GPU tests only beside a GPU.

Owns no fixture. pytest-randomly prints its seed, and Hypothesis uses the same one:
`--randomly-seed=N` repeats order and examples of a run together. No example has a
deadline: other programs share the cores, and a slow example says nothing. Long tests
come first, so that others run beside them.

A program that starts in the background may be told to ignore Ctrl-C, and all that it
starts with it. Here it is heard: many tests press it.

Many tests collect garbage, some at every instruction of an operation. What importing
and collecting the tests has made stays until the end, so the collector is told to pass
it over: otherwise each of these collections looks at a million objects that cannot go.
"""

from __future__ import annotations

import ctypes
import gc
import signal

import hypothesis.core
import pytest

hypothesis.settings.register_profile("shmlane", deadline=None, print_blob=True)
hypothesis.settings.load_profile("shmlane")


@pytest.hookimpl(trylast=True)  # after pytest-randomly has drawn its seed
def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    seed = config.getoption("randomly_seed", None)
    if isinstance(seed, int) and hypothesis.core.global_force_seed is None:
        # Declared as None there; what --hypothesis-seed sets is an int as well.
        hypothesis.core.global_force_seed = seed  # type: ignore[assignment]


def pytest_report_header() -> str:
    return f"hypothesis: seed {hypothesis.core.global_force_seed}, no deadline"


@pytest.hookimpl(trylast=True)  # after pytest-randomly has shuffled them
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and (reason := _why_no_gpu()):
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def _why_no_gpu() -> str:
    """Ask the driver itself: no CUDA package need be installed to know."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver (libcuda.so.1) on this machine"
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return "the CUDA driver does not start on this machine"
    return "" if count.value else "no CUDA device on this machine"
