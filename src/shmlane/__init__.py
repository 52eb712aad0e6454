"""Tensors to and from NVIDIA Triton Inference Server through shared memory."""

from __future__ import annotations

from .batches import BatchInfer
from .endpoint import Connection
from .errors import (
    AccessRestricted,
    ContenderFailed,
    ExtraMissing,
    ForkedSession,
    HandoffExpired,
    InferFailed,
    InferTimeout,
    InputMissing,
    InstallFailed,
    LeaseBusy,
    LeaseExpired,
    LeaseTimeout,
    LocalServerError,
    ModelNotReady,
    NotPicklable,
    OutOfSharedMemory,
    PoolClosed,
    PoolError,
    ProtocolError,
    RegionError,
    RegionNotVisible,
    RequestLost,
    ServerError,
    ServerStartFailed,
    ServerUnreachable,
    SharedMemoryDisabled,
    ShmlaneError,
    SlotsClaimed,
    TensorMismatch,
    TransportError,
    UnknownTensor,
    UnsupportedPlatform,
    UsageError,
    WireFallback,
)
from .futures import OwnedResult
from .handoff import SessionHandle, SlotRef
from .lease_async import AsyncLease
from .lease_blocking import Lease
from .leases import Result
from .metadata import ModelMetadata, TensorSpec
from .options import RequestOptions
from .outcomes import Stream
from .regions import RegionOptions
from .session import Session
from .session_async import AsyncSession
from .stats import SessionStats
from .streams_async import AsyncStream
from .timing import Timeouts

__version__ = "0.1.0"

__all__ = [
    "AccessRestricted",
    "AsyncLease",
    "AsyncSession",
    "AsyncStream",
    "BatchInfer",
    "Connection",
    "ContenderFailed",
    "ExtraMissing",
    "ForkedSession",
    "HandoffExpired",
    "InferFailed",
    "InferTimeout",
    "InputMissing",
    "InstallFailed",
    "Lease",
    "LeaseBusy",
    "LeaseExpired",
    "LeaseTimeout",
    "LocalServerError",
    "ModelMetadata",
    "ModelNotReady",
    "NotPicklable",
    "OutOfSharedMemory",
    "OwnedResult",
    "PoolClosed",
    "PoolError",
    "ProtocolError",
    "RegionError",
    "RegionNotVisible",
    "RegionOptions",
    "RequestLost",
    "RequestOptions",
    "Result",
    "ServerError",
    "ServerStartFailed",
    "ServerUnreachable",
    "Session",
    "SessionHandle",
    "SessionStats",
    "SharedMemoryDisabled",
    "ShmlaneError",
    "SlotRef",
    "SlotsClaimed",
    "Stream",
    "TensorMismatch",
    "TensorSpec",
    "Timeouts",
    "TransportError",
    "UnknownTensor",
    "UnsupportedPlatform",
    "UsageError",
    "WireFallback",
]
