"""Mistakes in a user's own test: the scripted server tells them where they are seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shmlane import InferFailed, Session, UsageError
from shmlane.testing import (
    Close,
    Delay,
    FakeModel,
    ScriptedServer,
    Status,
    identity_model,
)
from tests.raw_http import ask, infer, tensor
from tests.sessions import all_free


@pytest.mark.parametrize(
    ("fault", "hint"),
    [
        (503, "Status(503)"),
        (Close, "Close(...)"),
        (Delay, "Delay(...)"),
        (None, "Faults are made by Delay, Close"),
        ([Close()], "Faults are made by Delay, Close"),
        (ValueError("x"), "Faults are made by Delay, Close"),
    ],
)
def test_what_is_no_fault_is_refused_and_nothing_is_scripted(
    fault: Any, hint: str
) -> None:
    server = ScriptedServer([identity_model()])
    with pytest.raises(UsageError, match="not a fault to script") as caught:
        server.script(Status(503), fault)
    assert hint in caught.value.hint
    assert server.faults == ()


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (None, "returned NoneType, not arrays by name such as {'O': array}"),
        (np.ones((1, 2), np.float32), "returned ndarray, not arrays by name"),
        ({"P": np.ones((1, 2), np.float32)}, "returned output 'P'; its outputs are: O"),
        (
            {"O": np.ones((1, 2))},
            "returned output 'O' as FP64 [1, 2]; it declares FP32 [-1, 2]: return it"
            " with .astype(np.float32)",
        ),
        (
            {"O": np.ones((3, 4), np.float32)},
            "returned output 'O' as FP32 [3, 4]; it declares FP32 [-1, 2]",
        ),
        (
            {"O": np.ones(2, np.float32)},
            "returned output 'O' as FP32 [2]; it declares FP32 [-1, 2]",
        ),
        ({"O": [[1.0, 2.0]]}, "returned output 'O' as FP64 [1, 2]"),
        ({"O": [[1.0], [2.0, 3.0]]}, "returned output 'O' as what makes no array"),
        ({"O": None}, "returned output 'O' as dtype object, which Triton has not"),
        (
            {"O": np.ones((1, 2), np.complex64)},
            "returned output 'O' as dtype complex64",
        ),
    ],
)
def test_a_function_that_returns_the_wrong_thing_is_told_so(
    returned: Any, told: str
) -> None:
    model = FakeModel(
        "rows",
        inputs={"I": ("FP32", (2,))},
        outputs={"O": ("FP32", (2,))},
        run=lambda inputs: returned,
        max_batch_size=4,
    )
    with ScriptedServer([model]) as server, Session(server.url, "rows") as session:
        with pytest.raises(InferFailed) as caught:
            session.infer({"I": np.ones((1, 2), np.float32)})
        assert f"the function of fake model 'rows' {told}" in str(caught.value)
        assert caught.value.context["status"] == 500
        all_free(session)


def test_numbers_are_not_taken_for_bytes() -> None:
    model = FakeModel(
        "words",
        inputs={"I": ("FP32", (1,))},
        outputs={"O": ("BYTES", (1,))},
        run=lambda inputs: {"O": np.array([7], np.object_)},
    )
    asked = infer([tensor(name="I", shape=[1], data=[1.0])], model="words")
    with ScriptedServer([model]) as server:
        reply = ask(server.url, asked)
    assert reply.status == 500
    assert "declares BYTES [1]: return an array of bytes objects" in reply.error
