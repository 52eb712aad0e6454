"""Leases whose requests tritonclient may send, so that a program keeps its client.

Owns when a lease's slot is lent to that client, and what the lease refuses meanwhile.
Refuses to know tritonclient (`migration`).
"""

from __future__ import annotations

from typing import Any

from .errors import LeaseBusy, ShmlaneError, UsageError
from .leases import Result
from .migration import ForeignRequest, lent_now, triton_api
from .session_base import SendingLease
from .slots import Slot
from .timing import DEFAULT, Deadline


class BaseLendingLease(SendingLease):
    """What such leases have in common, however their callers wait."""

    __slots__ = ()

    def triton_result(self, reply: object) -> Result:
        """The outputs, where `reply` is the InferResult of that very request.

        Every output is checked as those of `infer` are. Afterwards the lease can be
        filled and sent again, with new objects; unless the same ones were sent more
        than once: an earlier request may still run then, and the lease can only be
        released. Raises `UsageError`, `InferFailed` and `ProtocolError`; then the slot
        still waits for its reply.
        """
        slot = self._slot
        # In a forked child the request is the parent's, and is not over.
        if slot is None or self._host._why_unusable() is not None:
            raise self._unusable(slot)
        foreign = lent_now(slot)
        if foreign is None:
            raise UsageError(
                "no request of tritonclient was begun in this lease since the last"
                " reply.",
                hint="Make its objects with triton_inputs() and triton_outputs().",
            )
        return foreign.take(reply)

    def _lent(self, protocol: str) -> ForeignRequest | None:
        """The request that has been begun already."""
        if (reason := self._host._why_unusable()) is not None:
            raise reason
        foreign = None if self._slot is None else lent_now(self._slot)
        if foreign is not None:
            foreign.check_protocol(protocol)
        return foreign

    def _unusable(self, slot: Slot | None) -> ShmlaneError:
        is_lent = slot is not None and lent_now(slot) is not None
        if not is_lent or self._host._why_unusable() is not None:
            return super()._unusable(slot)
        return LeaseBusy(
            "this lease was lent to tritonclient: its inputs and outputs belong to that"
            " request until its reply.",
            hint="Hand the reply to triton_result(), or release the lease and take"
            " another.",
        )


class LendingLease(BaseLendingLease):
    """A lease of a thread whose request another client may send."""

    __slots__ = ()

    def triton_inputs(self, *, protocol: str = "http") -> list[Any]:
        """The inputs given in this lease as `tritonclient.http.InferInput`, to be sent.

        protocol: "http", or "grpc" for objects of `tritonclient.grpc`. Those for
        asyncio take the same. They are good for one request. From here on the slot
        belongs to that request, and nothing more can be written: hand its reply to
        `triton_result`. A lease that ends without, be it after a timeout, gives its
        slot back once the server can no longer touch it, which is asked in the
        background. Raises `ExtraMissing`, `InputMissing`, and what `infer` raises
        before it sends.
        """
        return self._lend_to(protocol).inputs()

    def triton_outputs(self, *, protocol: str = "http") -> list[Any]:
        """All outputs as `tritonclient.http.InferRequestedOutput`; see `triton_inputs`.

        Outputs of unknown size come over the wire, unless `Session(outputs=)` declares
        them.
        """
        return self._lend_to(protocol).outputs()

    def _lend_to(self, protocol: str) -> ForeignRequest:
        foreign = self._lent(protocol)
        if foreign is not None:
            return foreign
        slot, engine, limit = self._check(DEFAULT, None)
        api = triton_api(protocol)
        engine.shell.make_ready(slot, self._given, Deadline(limit))
        return ForeignRequest.begin(slot, api, engine.exchange)
