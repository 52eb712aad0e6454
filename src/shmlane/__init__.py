"""Tensors to and from NVIDIA Triton Inference Server through shared memory."""

from __future__ import annotations

__version__ = "0.1.0"
