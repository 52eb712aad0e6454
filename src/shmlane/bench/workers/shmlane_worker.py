"""The contender shmlane, through its public API: a session, leases, blocking threads.

Owns nothing but the way in which a caller would use a lease. Refuses to know anything
behind the public API.
"""

from __future__ import annotations

import numpy as np

import shmlane

from .harness import Lane, Spec, serve


class ShmlaneClient:
    """One session; its slots are as many as requests in flight."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._session = shmlane.Session(
            spec.url,
            spec.model,
            slots=spec.concurrency,
            shapes={"INPUT__0": spec.shape},
        ).open()

    def lane(self, index: int) -> Lane:
        """A thread that takes a lease for every request."""
        return ShmlaneLane(self._session, self._spec)

    def close(self) -> None:
        """Unregister and remove the session's memory."""
        self._session.close()


class ShmlaneLane:
    """One thread's use of the session that all share."""

    def __init__(self, session: shmlane.Session, spec: Spec) -> None:
        self._session = session
        self._fill = spec.fill
        self._last = spec.last
        self._source = spec.source()

    def prepare(self) -> None:
        """Run each free slot once: a session notices lost registrations by itself."""
        self._session.warmup()

    def call(self, marker: float) -> bool:
        """Lease, view, write in place, infer, read in place."""
        with self._session.lease() as lease:
            view = lease["INPUT__0"]
            if self._fill:
                np.copyto(view, self._source)
            view[self._last] = marker
            result = lease.infer()
            return float(result["OUTPUT__0"][0]) == marker

    def close(self) -> None:
        """Nothing here is this lane's alone."""


if __name__ == "__main__":
    serve(ShmlaneClient)
