"""What comes between clients and the server, and how it fails.

Owns two proxies, over TCP and over a Unix socket, and their faults: those amid
requests, and those on connections on which nobody waits. Refuses to know the clients
and to decide how long a fault lasts: whoever causes one is given what ends it.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from tests.fault_proxy import FaultProxy, How, Link, Way

Undo = Callable[[], None]

_RIGHT = asdict(Way())
_INFERENCE = b"/infer HTTP/1.1"
_PATIENCE_LOST = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n"
# A reply has some 250 bytes, a request twice as many.
_LONGEST_CUT = 1500
_LONGEST_DELAY = 0.03
_GONE_WITHIN = 10.0


class Between:
    """Listens for as long as its `with` block lasts."""

    def __init__(self, target: str, *, folder: Path, dice: random.Random) -> None:
        self._dice = dice
        self._proxies = (
            FaultProxy(target),
            FaultProxy(target, unix_socket=folder / "http.sock"),
        )
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Between:
        with contextlib.ExitStack() as stack:
            for proxy in self._proxies:
                stack.enter_context(proxy)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def urls(self) -> tuple[str, ...]:
        """Over TCP, and over a Unix socket."""
        return tuple(proxy.url for proxy in self._proxies)

    # --- amid requests ----------------------------------------------------------------

    def break_off(self) -> None:
        how = self._dice.choice((How.CLOSE, How.RESET))
        for proxy in self._proxies:
            proxy.break_off(how)

    def cut(self) -> Undo:
        """Connections end in the middle of a request or of a reply."""
        return self._change(
            replies=self._dice.random() < 0.7,
            cut_after=self._dice.randrange(_LONGEST_CUT),
            how=self._dice.choice(tuple(How)),
        )

    def hold_up(self) -> Undo:
        """Nothing gets through in one direction."""
        return self._change(replies=self._dice.random() < 0.5, is_stalled=True)

    def delay(self) -> Undo:
        """All replies take longer."""
        return self._change(replies=True, delay=self._dice.uniform(0, _LONGEST_DELAY))

    def say_twice(self) -> Undo:
        """The next reply of each connection comes twice at once."""
        return self._change(replies=True, copies=2)

    def say_again(self) -> Undo:
        """The reply before comes again when the next one is already waited for.

        Of inferences only: nothing in the reply to a control request tells which
        request it answers.
        """
        return self._change(replies=False, echo_before=_INFERENCE)

    def answer_in_its_place(self) -> None:
        """What comes between has lost patience, whether or not anything was asked."""
        for proxy in self._proxies:
            proxy.inject(_PATIENCE_LOST)

    def close_idle(self) -> None:
        for proxy in self._proxies:
            proxy.close_idle()

    def _change(self, *, replies: bool, **changes: object) -> Undo:
        def change(changes: dict[str, object]) -> None:
            for proxy in self._proxies:
                (proxy.on_replies if replies else proxy.on_requests)(**changes)

        change(changes)
        return lambda: change({name: _RIGHT[name] for name in changes})

    # --- on idle connections ----------------------------------------------------------

    def spoil(self) -> int:
        """Do something to every connection while nothing is asked on any; how many.

        It is done when this returns: whoever asks now can see it first.
        """
        spoilt = list(self._links())
        for link in spoilt:
            # It may have ended by itself.
            with contextlib.suppress(OSError):
                self._dice.choice(_SPOILS)(link)
        deadline = time.monotonic() + _GONE_WITHIN
        while any(link.is_broken for link in self._links()):
            if time.monotonic() > deadline:
                raise TimeoutError("connections that were broken do not end")
            time.sleep(0.01)
        return len(spoilt)

    def put_right(self) -> None:
        """End every fault that lasts."""
        for proxy in self._proxies:
            proxy.on_requests(**_RIGHT)
            proxy.on_replies(**_RIGHT)

    def _links(self) -> Iterator[Link]:
        for proxy in self._proxies:
            yield from proxy.links

    def __repr__(self) -> str:
        return f"<Between {self._proxies!r}>"


def _stale_reply(link: Link) -> None:
    # The last but one bears the id that the next request has: nothing but that it comes
    # too early tells that it is no answer to it.
    link.inject(link.replied[0])


def _last_reply(link: Link) -> None:
    link.inject(link.replied[-1])


def _lose_patience(link: Link) -> None:
    link.inject(_PATIENCE_LOST)
    link.break_off()


def _reset(link: Link) -> None:
    link.break_off(How.RESET)


_SPOILS: tuple[Callable[[Link], None], ...] = (
    _stale_reply,
    _stale_reply,
    _last_reply,
    _lose_patience,
    Link.break_off,
    _reset,
    Link.half_close,
)

BETWEEN: dict[str, Callable[[Between], Undo | None]] = {
    "connections cut in a message": Between.cut,
    "idle connections closed": Between.close_idle,
    "bytes held up in between": Between.hold_up,
    "replies delayed": Between.delay,
    "replies sent twice": Between.say_twice,
    "earlier replies sent again": Between.say_again,
    "408 from in between": Between.answer_in_its_place,
}
