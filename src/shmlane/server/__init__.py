"""Running a real tritonserver on this machine, for demos, benchmarks and tests."""

from __future__ import annotations

from shmlane.server.models import demo_models
from shmlane.server.triton import TritonServer

__all__ = ["TritonServer", "demo_models"]
