"""Keeps one server process and ends all of it, whatever becomes of the owner.

A script, run by `shmlane.server.kept` in a process of its own, with one thread and the
standard library alone. Owns the server's process group: when the server ends, or the
owner asks, or the owner is gone (its pipe closes, or its process ends while a forked
child still holds the pipe), everything in the group is ended and what it left behind
is removed; the log stays and tells how it ended. Refuses to outlive the server, and the
server cannot outlive it: the kernel kills the server when this process dies.

Orders come as single letters on stdin: T ends the server in order, K kills it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import json
import os
import select
import signal
import sys
import time
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_MS = 500
GRACE_WITHOUT_OWNER = 3.0
REAP_TIMEOUT = 5.0


def main() -> int:
    """Start the server, keep it, clear up; the exit code is the server's."""
    plan = json.loads(sys.argv[1])
    libc = ctypes.CDLL(None)
    # Processes that a crashed server leaves become ours instead of init's.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakeup = watch_signals()
    log = open_log(plan["log"])
    server = start(plan, libc, log)
    os.write(1, f"{server}\n".encode())
    why = keep(server, plan, wakeup)
    code = end_group(server, plan)
    tell_end(log, code, why)
    return code if code >= 0 else 128 - code


def watch_signals() -> int:
    """A descriptor that becomes readable when a child ends or we are told to stop."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return reader


def open_log(path: str) -> int:
    """The log, locked while this process or the server has it open: it is in use."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with contextlib.suppress(OSError):
        fcntl.flock(log, fcntl.LOCK_SH)
    return log


def start(plan: dict[str, Any], libc: ctypes.CDLL, log: int) -> int:
    """Fork the server into a process group of its own that dies with us."""
    keeper = os.getpid()
    server = os.fork()
    if server:
        return server
    try:
        os.setpgid(0, 0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(126)
        for target, source in (
            (0, os.open(os.devnull, os.O_RDONLY)),
            (1, log),
            (2, log),
        ):
            os.dup2(source, target)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execvp(plan["command"][0], plan["command"])
    except OSError as error:
        os.write(log, f"cannot run {plan['command'][0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def keep(server: int, plan: dict[str, Any], wakeup: int) -> str:
    """Return once the server has ended, with the reason; pass on orders until then."""
    why = "unasked"
    poller = select.poll()
    poller.register(0, select.POLLIN)
    poller.register(wakeup, select.POLLIN)
    deadline = None
    while not has_ended(server):
        ready = {descriptor for descriptor, _ in poller.poll(POLL_MS)}
        grace = None
        if 0 in ready and (orders := os.read(0, 64)):
            why = "as asked"
            if b"K" in orders:
                os.kill(server, signal.SIGKILL)
            if b"T" in orders:
                grace = plan["grace"]
        elif 0 in ready or os.getppid() != plan["owner"]:
            grace, why = GRACE_WITHOUT_OWNER, f"as process {plan['owner']} was gone"
            with contextlib.suppress(KeyError):
                poller.unregister(0)
        if wakeup in ready and told_to_stop(os.read(wakeup, 64)):
            grace, why = plan["grace"], "as its keeper was told to stop"
        if grace is not None and deadline is None:
            os.kill(server, signal.SIGTERM)
            deadline = time.monotonic() + grace
        if deadline is not None and time.monotonic() > deadline:
            os.kill(server, signal.SIGKILL)
    return why


def told_to_stop(signals: bytes) -> bool:
    return signal.SIGTERM in signals or signal.SIGHUP in signals


def has_ended(server: int) -> bool:
    """Whether the server has ended. It is left unreaped: its number, which is that of
    the group too, cannot be given to a stranger before the group is killed."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, server, flags) is not None


def end_group(server: int, plan: dict[str, Any]) -> int:
    """Kill what is left of the group, reap it, remove its files.

    Returns the server's exit code, or minus the signal that ended it.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server, signal.SIGKILL)
    _, status = os.waitpid(server, 0)
    deadline = time.monotonic() + REAP_TIMEOUT
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)
    remove_leavings(plan)
    return os.waitstatus_to_exitcode(status)


def tell_end(log: int, code: int, why: str) -> None:
    """The last line of the log. Nobody else may be left to tell."""
    how = f"with exit code {code}"
    if code < 0:
        how = f"by signal {-code} ({signal.strsignal(-code)})"
    with contextlib.suppress(OSError):
        os.write(log, f"shmlane: the server ended {how}, {why}\n".encode())


def remove_leavings(plan: dict[str, Any]) -> None:
    """Remove the server's sockets and the segments that carry its own prefix."""
    paths = list(plan["unlink"])
    if prefix := plan["shm_prefix"]:
        paths += glob.glob(f"/dev/shm/{glob.escape(prefix)}*")
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


if __name__ == "__main__":
    sys.exit(main())
