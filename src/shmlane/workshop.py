"""Threads that fill slots and read results, for one stream.

Owns the work that is in their hands, and the leases that go with it. Refuses to know
what the work is.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from .board import Board
from .leases import BaseLease


class Workshop:
    """Work of one stream, done in threads and finished in its own.

    busy: how many pieces of work are not finished yet.
    """

    def __init__(self, threads: ThreadPoolExecutor, board: Board[Any]) -> None:
        self.busy = 0
        self._threads = threads
        self._board = board
        self._leases: dict[Future[object], BaseLease] = {}
        self._ended: deque[
            tuple[Future[object], Callable[[Exception | None], object]]
        ] = deque()

    def do(
        self,
        work: Callable[[], object],
        then: Callable[[Exception | None], object],
        lease: BaseLease,
    ) -> None:
        """`work` in a thread, which has `lease` meanwhile; `then` in `finish`."""
        future = self._threads.submit(work)
        self._leases[future] = lease
        self.busy += 1

        def ended(future: Future[object]) -> None:
            self._ended.append((future, then))
            self._board.ring()

        future.add_done_callback(ended)

    def finish(self) -> None:
        """Go on with what the threads have done."""
        while self._ended:
            future, then = self._ended.popleft()
            lease = self._leases.pop(future)
            self.busy -= 1
            error = future.exception()
            if error is not None and not isinstance(error, Exception):
                lease.release()
                raise error
            then(error)

    def close(self) -> None:
        """Wait for work that was begun, then give back its leases."""
        # One of the threads cannot wait for itself, should it end the stream.
        with contextlib.suppress(RuntimeError):
            self._threads.shutdown(wait=True, cancel_futures=True)
        while self._leases:
            _, lease = self._leases.popitem()
            lease.release()
        # Whoever keeps an error keeps the stream, which has nothing on its way.
        self.busy = 0
        self._ended.clear()
