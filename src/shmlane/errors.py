"""Every exception of the package, grouped by who must act.

Owns the tree under `ShmlaneError` and nothing else: no module defines an exception
elsewhere. Each class is also the builtin a caller would naturally catch. Messages are
written where the fact is known; they say what, which (names, limits, counts) and what
to do next.
"""

from __future__ import annotations


class ShmlaneError(Exception):
    """Root of everything shmlane raises on purpose.

    `hint` is what to do next (empty when the message says it all), `retryable` tells
    whether the same call may succeed if simply repeated, and `context` holds the named
    facts of the message for programs.
    """

    retryable = False

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        retryable: bool | None = None,
        **context: object,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.context = context
        if retryable is not None:
            self.retryable = retryable

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by state: keyword-only arguments do not survive the default way."""
        return (_rebuild, (type(self), self.message, self.__dict__.copy()))


def _rebuild(
    cls: type[ShmlaneError], message: str, state: dict[str, object]
) -> ShmlaneError:
    error = cls(message)
    error.__dict__.update(state)
    return error


# --- the caller's mistake -------------------------------------------------------------


class UsageError(ShmlaneError):
    """The call itself is wrong; repeating it changes nothing."""


class ExtraMissing(UsageError, ImportError):
    """An optional package is not installed; the message names the extra."""


class UnknownTensor(UsageError, KeyError):
    """The model has no input or output of that name."""

    # KeyError quotes its argument; ours is a sentence.
    __str__ = ShmlaneError.__str__


class TensorMismatch(UsageError, ValueError):
    """A datatype or shape that the model does not accept."""


class InputMissing(UsageError, ValueError):
    """A required input was neither viewed nor written in this lease."""


class LeaseExpired(UsageError, RuntimeError):
    """A lease or result was used after the memory behind it went back to the pool."""


class HandoffExpired(UsageError, RuntimeError):
    """A slot was adopted before, or taken back, or its home has ended."""


class LeaseBusy(UsageError, RuntimeError):
    """The lease still waits for the reply of an earlier request on the same memory."""


class ForkedSession(UsageError, RuntimeError):
    """A session opened before a fork was used in the child process."""


class NotPicklable(UsageError, TypeError):
    """What belongs to this process, as a session does, was to be pickled or copied."""


class UnsupportedPlatform(UsageError, NotImplementedError):
    """Shared memory as Triton uses it does not exist on this operating system."""


# --- this machine ---------------------------------------------------------------------


class RegionError(ShmlaneError):
    """Shared memory could not be made, found or used on this machine."""


class OutOfSharedMemory(RegionError, MemoryError):
    """Too little room for shared memory, found before any page is used."""


class RegionNotVisible(RegionError, OSError):
    """The server cannot open a region that exists here."""


# --- load -----------------------------------------------------------------------------


class PoolError(ShmlaneError):
    """The pool of slots could not serve the call."""


class LeaseTimeout(PoolError, TimeoutError):
    """No slot became free in time."""

    retryable = True


class SlotsClaimed(PoolError):
    """Other processes have claimed the slots of a shared region."""

    retryable = True


class PoolClosed(PoolError, RuntimeError):
    """The session was closed, before the call or while it waited."""


# --- the network ----------------------------------------------------------------------


class TransportError(ShmlaneError):
    """Bytes did not travel as they should between this process and the server."""


class ServerUnreachable(TransportError, ConnectionError):
    """No connection could be made before the deadline."""

    retryable = True


class InferTimeout(TransportError, TimeoutError):
    """The reply did not come in time. The slot stays set aside until it does."""

    retryable = True


class RequestLost(TransportError, ConnectionError):
    """The connection broke after the request had left; the model may have run."""

    retryable = True


class ProtocolError(TransportError):
    """What came back is not a reply that Triton sends."""


# --- the server said no ---------------------------------------------------------------


class ServerError(ShmlaneError):
    """Triton answered with an error. `context` has `status` and the server's `text`."""


class ModelNotReady(ServerError):
    """The model, or that version of it, is missing, loading or failed to load."""


class SharedMemoryDisabled(ServerError):
    """The server refuses client shared memory by its start-up options."""


class AccessRestricted(ServerError, PermissionError):
    """The server restricts this API and expects a header that was not sent."""


class InferFailed(ServerError):
    """The server refused or failed the inference; output content is undefined."""


# --- no error ------------------------------------------------------------------------


class WireFallback(UserWarning):
    """Tensors go over the wire, because shared memory cannot be used; it says why."""


# --- a server that runs on this machine ---------------------------------------------


class LocalServerError(ShmlaneError, RuntimeError):
    """A server or tool that shmlane runs on this machine could not be made ready."""


class InstallFailed(LocalServerError):
    """A server, an interpreter or packages are missing and cannot be installed."""


class ServerStartFailed(LocalServerError):
    """A tritonserver did not become ready; `context` has the end of its `log`."""


class ContenderFailed(LocalServerError):
    """A contender of a benchmark did not start, broke off or fell silent."""
