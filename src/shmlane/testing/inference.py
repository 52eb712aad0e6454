"""One inference from its request to its reply: read, checked, run, written in place.

Owns the order of things, which decides what a client's memory holds when something goes
wrong: regions are in use from the reading of the request until before the reply leaves,
inputs are read when the model runs, and outputs are written one after the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import ServerError
from ..metadata import Array
from . import codec, outputs
from .calls import Call, CallReader
from .checks import check
from .classes import ranked
from .counters import ModelCounters
from .dialect import Dialect
from .faults import Delay
from .http import Reply, Request, compact, refused
from .memory import RegionTable
from .models import FakeModel
from .script import Stage

_LONGEST_DELAY_MS = 60_000


class Inference:
    """One request to one model. Used once, by one thread."""

    def __init__(
        self,
        request: Request,
        model: FakeModel,
        *,
        version: str,
        regions: RegionTable,
        dialect: Dialect,
        counters: ModelCounters,
    ) -> None:
        self._model = model
        self._version = version
        self._regions = regions
        self._dialect = dialect
        self._counters = counters
        self._reader = CallReader(request, model, regions, dialect)

    def answer(
        self, stage: Stage, ended: threading.Event, delay: Delay | None
    ) -> Reply | None:
        """The reply, None when the server ended meanwhile.

        Raises `RegionError` for what would end a Triton.
        """
        call = self._reader.call
        try:
            self._reader.read()
            check(call, self._model, self._dialect)
            with stage.enter(ended, delay):
                reply = self._run(call, ended)
        except ServerError as error:
            reply = Reply.of_error(error)
        finally:
            self._regions.give_back(call.blocks)
        # From the reading of the body on the frontend does not read on.
        return replace(reply, pauses=True) if reply else None

    def _run(self, call: Call, ended: threading.Event) -> Reply | None:
        started = time.perf_counter_ns()
        succeeded = False
        try:
            _wait(call, ended)
            if ended.is_set():
                return None
            made = self._outputs(call)
            # Memory torn away while the model read it.
            for tensor in call.inputs.values():
                tensor.data()
            reply = self._write(call, made)
            succeeded = True
            return reply
        finally:
            self._counters.count(
                succeeded=succeeded, duration_ns=time.perf_counter_ns() - started
            )

    def _outputs(self, call: Call) -> dict[str, Array]:
        """What the user's function makes of the inputs."""
        model = self._model
        inputs = {
            name: codec.decode(tensor.data(), tensor.datatype, tensor.shape)
            for name, tensor in call.inputs.items()
        }
        try:
            made = model.run(inputs)
        except ValueError as error:
            raise refused(400, str(error), plain=True) from error
        except Exception as error:
            raise refused(
                500, f"{type(error).__name__}: {error}", plain=True
            ) from error
        wanted = [name for name in model.outputs if call.wish(name)]
        return outputs.checked(model, made, wanted=wanted)

    def _write(self, call: Call, made: Mapping[str, Array]) -> Reply:
        """Put every wanted output where it was wanted."""
        entries, blobs = [], []
        for name, array in made.items():
            wish = call.wish(name)
            if wish is None:
                continue
            datatype = self._model.outputs[name].datatype
            if wish.classes:
                is_batched = self._model.max_batch_size > 0
                array = ranked(array, wish.classes, is_batched=is_batched)
                datatype = codec.BYTES
            entry: dict[str, Any] = {
                "name": name,
                "datatype": datatype,
                "shape": list(array.shape),
            }
            if wish.block is None and not wish.binary:
                entry["data"] = codec.to_json(array, datatype)
            else:
                data = codec.encode(array)
                if wish.block is None:
                    entry["parameters"] = {"binary_data_size": len(data)}
                    blobs.append(data)
                elif len(data) > wish.block.nbytes:
                    raise _block_too_small(name, wish.block.nbytes, len(data))
                else:
                    wish.block.touch(len(data))[:] = np.frombuffer(data, np.uint8)
            entries.append(entry)
        return self._reply(call, entries, b"".join(blobs))

    def _reply(self, call: Call, entries: list[dict[str, Any]], binary: bytes) -> Reply:
        head = {"id": call.request_id} if call.request_id else {}
        told = self._model.parameters
        text = compact(
            {
                **head,
                "model_name": self._model.name,
                "model_version": self._version,
                **({"parameters": dict(told)} if told else {}),
                "outputs": entries,
            }
        )
        if not binary:
            return Reply(200, text)
        length = ("Inference-Header-Content-Length", str(len(text)))
        return Reply(200, text + binary, "application/octet-stream", (length,))


def _wait(call: Call, ended: threading.Event) -> None:
    """The demo models' parameter `delay_ms`."""
    if not 0 <= call.delay_ms <= _LONGEST_DELAY_MS:
        raise refused(400, f"delay_ms must be 0 to {_LONGEST_DELAY_MS}", plain=True)
    if call.delay_ms:
        ended.wait(call.delay_ms / 1000)


def _block_too_small(name: str, given: int, needed: int) -> ServerError:
    return refused(
        500,
        f"shared memory size specified with the request for output '{name}' ({given}"
        f" bytes) should be at least {needed} bytes to hold the results",
        plain=True,
    )
