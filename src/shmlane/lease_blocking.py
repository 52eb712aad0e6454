"""What a caller in a thread holds: a lease on a slot's inputs, which waits for replies.

Owns what such a lease sends, and when that has to be refused. Refuses to make sessions
(`session`), and to know how replies are waited for (`blocking`, `receiver`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from .errors import UsageError
from .exchange import Answer
from .futures import Kept, OwnedResult, Submission
from .leases import Result
from .metadata import Array
from .migration_leases import LendingLease
from .options import RequestOptions
from .session_base import OPEN, checked_limit
from .slots import Slot
from .timing import DEFAULT, Timeout


class Lease(LendingLease):
    """The right to use one slot: fill inputs, infer, read the result in place."""

    __slots__ = ()

    def infer(
        self, *, timeout: Timeout = DEFAULT, options: RequestOptions | None = None
    ) -> Result:
        """Send the inputs that were filled in this lease and wait for the outputs.

        timeout: seconds for this call, `Timeouts.infer` if not given, None for ever.
        options: what the request asks for beside its tensors.
        A second call sends the same inputs again unless they were changed; the earlier
        Result expires. Raises `InputMissing`, `InferTimeout`, `RequestLost`,
        `ServerUnreachable`, `ModelNotReady`, `InferFailed`. After each of them the
        lease can be released as usual, and the slot comes back by itself.
        """
        slot = self._slot
        given = self._given
        if slot is None or slot.server_hold or given & slot.required != slot.required:
            raise self._not_ready(slot)
        host = self._host
        engine = host._engine
        if engine is None or host._state is not OPEN:
            raise host._unusable()
        if options is not None and not isinstance(options, RequestOptions):
            raise UsageError(
                f"options is a {type(options).__name__}: give RequestOptions(...)."
            )
        limit = host._timeouts.infer
        if timeout is not DEFAULT:
            limit = checked_limit(timeout)
        # Whatever was read before expires, also if this fails.
        slot.epoch = epoch = slot.epoch + 1
        return Result(slot, epoch, engine.shell.infer(slot, given, limit, options))

    def submit(
        self, *, timeout: Timeout = DEFAULT, options: RequestOptions | None = None
    ) -> Future[OwnedResult]:
        """Send as `infer` does, and have a future in the place of the result.

        The lease ends here: the slot goes with the future, and then with its result,
        until that is released or dropped. What `infer` raises, the future raises,
        except for `InputMissing` and `UsageError`. It waits for the server's reply, not
        for a thread to run: cancelling it works until then, and the slot comes back
        with the late reply. Making a connection may keep this waiting. Callbacks run in
        the one thread that reads replies: they must not wait for other requests.
        """
        return self._submit(OwnedResult, timeout, options)

    def _submit_copies(
        self, timeout: Timeout, options: RequestOptions | None
    ) -> Future[dict[str, Array]]:
        """As `submit`, for copies of the outputs."""
        return self._submit(_copies, timeout, options)

    def _submit(
        self,
        make: Callable[[Slot, int, Answer, Kept], object],
        timeout: Timeout,
        options: RequestOptions | None,
    ) -> Future[Any]:
        slot, engine, limit = self._check(timeout, options)
        slot.epoch = epoch = slot.epoch + 1
        kept = Kept(self._host)
        result = functools.partial(make, slot, epoch)
        submission = Submission(kept, slot, self._given, limit, options, make=result)
        # First: Ctrl-C must not leave a lease that can be used and has no slot.
        self._go_with_future()
        kept.take_over(self)
        return engine.receiver.submit(submission)


def _copies(slot: Slot, epoch: int, answer: Answer, kept: Kept) -> dict[str, Array]:
    """The outputs as arrays of their own; the slot goes back at once."""
    outputs = Result(slot, epoch, answer)._take()
    kept.release()
    return outputs
