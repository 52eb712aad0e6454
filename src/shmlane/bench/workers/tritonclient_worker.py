"""The contender tritonclient, as well as its API allows: objects made once and reused.

Owns the four ways in which people use it. Runs in an environment of its own, so it
imports no shmlane, and loads tritonclient by name because only that environment has it.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np

from .harness import Array, Lane, Lanes, Spec, Traffic, serve

_OUTPUT_BYTES = 4
_UNREGISTER_TRIES = 1000


class TritonClients:
    """Makes lanes, each with a client of its own: the HTTP one is not thread-safe."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        protocol = "grpc" if "grpc" in spec.contender else "http"
        self._api = importlib.import_module(f"tritonclient.{protocol}")
        self._lanes: dict[str, type[InTheRequest | InPlace | RegisterPerCall]] = {
            "in place": InPlace,
            "set per call": SetPerCall,
            "register per call": RegisterPerCall,
            "in the request": InTheRequest,
        }

    def traffic(self) -> Traffic:
        """One thread for each request in flight."""
        return Lanes(self.lane, self._spec.concurrency)

    def lane(self, index: int) -> Lane:
        """A lane of the way that the contender stands for."""
        return self._lanes[self._spec.way](self._api, self._spec, index)

    def close(self) -> None:
        """The lanes have closed all there was."""


class BaseLane:
    """A client, and the input and output objects that all calls use."""

    def __init__(self, api: Any, spec: Spec, index: int) -> None:
        self.api = api
        self.spec = spec
        self.client = api.InferenceServerClient(spec.url)
        self.source = spec.source()
        self.input = api.InferInput("INPUT__0", list(spec.shape), "FP32")
        self.output = api.InferRequestedOutput("OUTPUT__0")
        self.inputs, self.outputs = [self.input], [self.output]
        self.index = index
        self.start()

    def start(self) -> None:
        """What this way makes once."""

    def prepare(self) -> None:
        """What this way makes again for every round."""

    def infer(self) -> Any:
        """One request with the reused objects."""
        return self.client.infer(self.spec.model, self.inputs, outputs=self.outputs)

    def close(self) -> None:
        """Give back what was made."""
        self.client.close()


class InTheRequest(BaseLane):
    """Tensors travel in the request and the reply."""

    def call(self, marker: float) -> bool:
        """Change the ready array, serialise it, infer, read."""
        self.source[self.spec.last] = marker
        self.input.set_data_from_numpy(self.source)
        return float(self.infer().as_numpy("OUTPUT__0")[0]) == marker


class Regions:
    """Two regions of one lane, made by tritonclient's own helper."""

    def __init__(self, lane: BaseLane) -> None:
        self.shm = importlib.import_module("tritonclient.utils.shared_memory")
        self._client = lane.client
        base = f"tritonclient_bench_{os.getpid()}_{lane.index}"
        self._sizes = {
            f"{base}_in": lane.source.nbytes,
            f"{base}_out": _OUTPUT_BYTES,
        }
        self.input, self.output = (
            self.shm.create_shared_memory_region(name, f"/{name}", size)
            for name, size in self._sizes.items()
        )
        (input_name, input_size), (output_name, output_size) = self._sizes.items()
        lane.input.set_shared_memory(input_name, input_size)
        lane.output.set_shared_memory(output_name, output_size)

    def register(self) -> None:
        """Tell the server about both."""
        for name, size in self._sizes.items():
            self._client.register_system_shared_memory(name, f"/{name}", size)

    def unregister(self) -> None:
        """Until the server agrees: it may still hold a region whose reply has come.

        Unknown names are no error to it.
        """
        for name in self._sizes:
            for tries_left in reversed(range(_UNREGISTER_TRIES)):
                try:
                    self._client.unregister_system_shared_memory(name)
                    break
                except Exception as error:
                    if not (tries_left and "currently in use" in str(error)):
                        raise

    def view(self, handle: Any, shape: tuple[int, ...]) -> Array:
        """A writable array over a region."""
        array: Array = self.shm.get_contents_as_numpy(handle, np.float32, shape)
        return array

    def destroy(self) -> None:
        """Remove both files. No view may be left."""
        for handle in (self.input, self.output):
            self.shm.destroy_shared_memory_region(handle)


class InPlace(BaseLane):
    """Registered once; input and output are arrays over the regions."""

    def start(self) -> None:
        """Make the regions and the arrays, and fill the input."""
        self.regions = Regions(self)
        self.view = self.regions.view(self.regions.input, self.spec.shape)
        self.reply = self.regions.view(self.regions.output, (1,))
        self.view[...] = self.source

    def prepare(self) -> None:
        """Another client may have had the server forget every region."""
        self.regions.unregister()
        self.regions.register()

    def call(self, marker: float) -> bool:
        """Write in place, infer, read in place."""
        if self.spec.fill:
            np.copyto(self.view, self.source)
        self.view[self.spec.last] = marker
        self.infer()
        return float(self.reply[0]) == marker

    def close(self) -> None:
        """Unregister, and remove the regions."""
        self.regions.unregister()
        del self.view, self.reply
        self.regions.destroy()
        super().close()


class SetPerCall(InPlace):
    """Registered once; every call copies in with `set_shared_memory_region`."""

    def call(self, marker: float) -> bool:
        """Copy in by the helper, infer, read by the helper."""
        regions = self.regions
        self.source[self.spec.last] = marker
        regions.shm.set_shared_memory_region(regions.input, [self.source])
        self.infer()
        return float(regions.view(regions.output, (1,))[0]) == marker


class RegisterPerCall(BaseLane):
    """Every call makes, registers, unregisters and removes its regions."""

    def call(self, marker: float) -> bool:
        """The whole life of two regions for one request."""
        regions = Regions(self)
        try:
            regions.register()
            self.source[self.spec.last] = marker
            regions.shm.set_shared_memory_region(regions.input, [self.source])
            self.infer()
            return float(regions.view(regions.output, (1,))[0]) == marker
        finally:
            regions.unregister()
            regions.destroy()


if __name__ == "__main__":
    serve(TritonClients)
