"""Other processes of a test: Python that does what it is told, line by line.

Owns starting, asking and ending them. Refuses to leave one behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest

from shmlane import SlotRef

_TIMEOUT = 60.0

# Answers each line, one expression or statement, with the repr of its value or error.
_PROGRAM = """
import ast, json, sys
import numpy as np
import shmlane
from shmlane import Session, SessionHandle, SlotRef, Timeouts, engine

# As the fixture `thorough` has it.
engine._CLEAN_LIMIT = 10.0
names = globals()

def evaluate(text):
    try:
        code = compile(text, "<told>", "eval")
    except SyntaxError:
        exec(text, names)
        return None
    return eval(code, names)

def infer(session, ref):
    with session.adopt(SlotRef.parse(ref)) as lease:
        return float(lease.infer()["OUTPUT__0"].ravel()[-1])

print(flush=True)
for line in sys.stdin:
    try:
        answer = evaluate(json.loads(line))
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)]), flush=True)
    else:
        print(json.dumps([None, answer], default=repr), flush=True)
"""


class Told(Exception):
    """What the other process raised; `kind` is the name of its class."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Other:
    """A running Python. Its modules are NumPy and shmlane with the usual names."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    def tell(self, line: str) -> None:
        """Have it do something; `hear` says what came of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """The value of what it was told first; raises `Told`."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._fail()
        kind, answer = json.loads(line)
        if kind is not None:
            raise Told(kind, answer)
        return answer

    def ask(self, line: str) -> Any:
        self.tell(line)
        return self.hear()

    def adopt(self, detach: Callable[[], SlotRef]) -> SlotRef:
        """Have its `session` adopt what `detach` gives; `lease` is its name there.

        Again where the time for it was over: it may not have run meanwhile.
        """
        while True:
            ref = detach()
            try:
                self.ask(f"lease = session.adopt(SlotRef.parse({str(ref)!r}))")
            except Told as error:
                if error.kind != "HandoffExpired":
                    raise
            else:
                return ref

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it as a crash would."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait(_TIMEOUT)

    def end(self) -> None:
        """Have it end as a program does; it must have nothing to complain of."""
        _, errors = self._process.communicate(timeout=_TIMEOUT)
        assert (self._process.returncode, errors) == (0, "")

    def _fail(self) -> NoReturn:
        _, errors = self._process.communicate(timeout=_TIMEOUT)
        pytest.fail(f"the other process ended: {errors}")


@contextlib.contextmanager
def other() -> Iterator[Other]:
    """A process that runs until the end of the block, at the latest."""
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "\n":
                Other(process)._fail()
            yield Other(process)
        finally:
            process.kill()
