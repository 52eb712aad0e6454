"""Paths and methods: which request means what, and what Triton answers to it.

Owns the endpoints of KServe v2 and of Triton's extensions that clients of shared memory
use (Triton's http_server.cc). Refuses to know connections and faults.
"""

from __future__ import annotations

import base64
import binascii
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import ServerError
from . import json_fields as fields
from .counters import ModelCounters
from .dialect import Dialect
from .faults import Delay
from .http import Reply, Request, refused
from .inference import Inference
from .memory import RegionTable, RegisteredRegion
from .models import FakeModel
from .script import Stage

_EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)
_CUDA_HANDLE_BYTES = 64
_MODEL = r"/v2/models/([^/]+)(?:/versions/([0-9]+))?"
_MEMORY = r"/v2/(system|cuda)sharedmemory(?:/region/([^/]+))?"

Groups = tuple[str | None, ...]
Handler = Callable[[Request, Groups], Reply]


class Api:
    """Answers the requests to one server process. Thread-safe.

    restricted: the name and value of the header that the restricted APIs expect, and
        their names as in `--http-restricted-api`.
    """

    def __init__(
        self,
        models: Iterable[FakeModel],
        *,
        dialect: Dialect,
        regions: RegionTable,
        stage: Stage,
        ended: threading.Event,
        restricted: tuple[str, str] | None,
        restricted_apis: Iterable[str],
    ) -> None:
        self._models = {model.name: model for model in models}
        self._dialect = dialect
        self._regions = regions
        self._stage = stage
        self._ended = ended
        self._restricted = restricted
        self._restricted_apis = frozenset(restricted_apis)
        self._counters = {
            model.name: ModelCounters(model) for model in self._models.values()
        }
        # Path, API as it can be restricted, method, handler. The first match counts.
        self._routes: tuple[tuple[re.Pattern[str], str, str, Handler], ...] = tuple(
            (re.compile(path), api, method, handler)
            for path, api, method, handler in (
                (r"/v2", "metadata", "GET", self._server_metadata),
                (r"/v2/health/live", "health", "GET", self._live),
                (r"/v2/health/ready", "health", "GET", self._ready),
                (r"/v2/models/stats", "statistics", "GET", self._all_statistics),
                (f"{_MODEL}/ready", "health", "GET", self._model_ready),
                (f"{_MODEL}/config", "model-config", "GET", self._model_config),
                (f"{_MODEL}/stats", "statistics", "GET", self._statistics),
                (_MODEL, "metadata", "GET", self._model_metadata),
                (r"/v2/repository/index", "model-repository", "POST", self._index),
                (f"{_MEMORY}/status", "shared-memory", "GET", self._status),
                (f"{_MEMORY}/register", "shared-memory", "POST", self._register),
                (f"{_MEMORY}/unregister", "shared-memory", "POST", self._unregister),
            )
        )
        self._infer_path = re.compile(f"{_MODEL}/infer")

    def answer(self, request: Request, delay: Delay | None = None) -> Reply | None:
        """The reply; None when the server ended meanwhile.

        delay: makes the request stay inside the model, or simply here, for so long.
        Raises `RegionError` when such a Triton would die of the request.
        """
        try:
            if match := self._infer_path.fullmatch(request.path):
                self._check_access(request, "inference")
                _check_method(request, "POST", plain=True)
                return self._infer(request, match.groups(), delay)
            if delay is not None:
                delay.wait(self._ended)
            return None if self._ended.is_set() else self._route(request)
        except ServerError as error:
            return Reply.of_error(error)

    def _route(self, request: Request) -> Reply:
        for path, api, method, handler in self._routes:
            if match := path.fullmatch(request.path):
                self._check_access(request, api)
                _check_method(request, method, plain=api == "health")
                return handler(request, match.groups())
        raise refused(404, "Not Found", plain=True)

    def _check_access(self, request: Request, api: str) -> None:
        if self._restricted is None or api not in self._restricted_apis:
            return
        name, value = self._restricted
        if request.headers.get(name.lower()) != value:
            raise refused(
                403, f"This API is restricted, expecting header '{name}'", plain=True
            )

    # --- server and models ------------------------------------------------------------

    def _server_metadata(self, request: Request, groups: Groups) -> Reply:
        about = {
            "name": "scripted",
            "version": self._dialect.version,
            "extensions": _EXTENSIONS,
        }
        return Reply.json(about)

    def _live(self, request: Request, groups: Groups) -> Reply:
        return Reply.empty()

    def _ready(self, request: Request, groups: Groups) -> Reply:
        ready = all(model.is_ready for model in self._models.values())
        return Reply.empty(200 if ready else 400)

    def _model_metadata(self, request: Request, groups: Groups) -> Reply:
        return Reply.json(self._find(groups)[0].metadata())

    def _model_config(self, request: Request, groups: Groups) -> Reply:
        return Reply.json(self._find(groups)[0].config())

    def _model_ready(self, request: Request, groups: Groups) -> Reply:
        try:
            self._find(groups)
        except ServerError:
            raise refused(400, "Model version not ready", plain=True) from None
        return Reply.empty()

    def _find(self, groups: Groups, *, plain: bool = False) -> tuple[FakeModel, str]:
        """The model and version that a path names."""
        name, version = groups
        model = self._models.get(name or "")
        unknown = f"Request for unknown model: '{name}'"
        if version is not None:
            unknown += f" version {version}"
        if model is None or (version is not None and version not in model.versions):
            raise refused(404, f"{unknown} is not found", plain=plain)
        if not model.is_ready:
            if version is not None:
                raise refused(503, f"{unknown} is not at ready state", plain=plain)
            raise refused(404, f"{unknown} has no available versions", plain=plain)
        return model, version or model.versions[-1]

    def _index(self, request: Request, groups: Groups) -> Reply:
        wish = fields.parse(request.body) if request.body else {}
        wants_ready = isinstance(wish, Mapping) and wish.get("ready") is True
        return Reply.json(
            [
                {
                    "name": name,
                    "version": version,
                    "state": "READY" if model.is_ready else "LOADING",
                }
                for name, model in sorted(self._models.items())
                for version in model.versions
                if model.is_ready or not wants_ready
            ]
        )

    def _statistics(self, request: Request, groups: Groups) -> Reply:
        name, version = groups
        try:
            model, latest = self._find(groups)
        except ServerError:
            raise refused(400, f"requested model '{name}' is not available") from None
        versions = [version or latest] if version else model.versions
        counters = self._counters[model.name]
        return Reply.json(
            {"model_stats": [counters.as_json(each) for each in versions]}
        )

    def _all_statistics(self, request: Request, groups: Groups) -> Reply:
        stats = [
            self._counters[name].as_json(version)
            for name, model in sorted(self._models.items())
            for version in model.versions
        ]
        return Reply.json({"model_stats": stats})

    def _infer(
        self, request: Request, groups: Groups, delay: Delay | None
    ) -> Reply | None:
        model, version = self._find(groups, plain=True)
        if model.decoupled:
            raise refused(
                501,
                "HTTP end point doesn't support models with decoupled transaction"
                " policy",
                plain=True,
            )
        if request.headers.get("content-encoding", "identity") != "identity":
            raise refused(501, "Unsupported compression type", plain=True)
        inference = Inference(
            request,
            model,
            version=version,
            regions=self._regions,
            dialect=self._dialect,
            counters=self._counters[model.name],
        )
        return inference.answer(self._stage, self._ended, delay)

    # --- shared memory ----------------------------------------------------------------

    def _status(self, request: Request, groups: Groups) -> Reply:
        kind, name = groups
        known = self._regions.status() if kind == "system" else []
        if name is not None:
            known = [region for region in known if region.name == name]
            if not known:
                raise refused(
                    404, f"Unable to find {kind} shared memory region: '{name}'"
                )
        return Reply.json([region._asdict() for region in known])

    def _register(self, request: Request, groups: Groups) -> Reply:
        kind, name = groups
        if name is None:
            raise refused(
                400,
                f"'region name' is necessary to register {kind} shared memory region",
            )
        document = fields.parse(request.body)
        if kind == "cuda":
            raise _no_gpu(document)
        key = fields.string(_field(document, "key"))
        offset = fields.unsigned(document.get("offset", 0))
        nbytes = fields.unsigned(_field(document, "byte_size"))
        self._regions.register(RegisteredRegion(name, key, offset, nbytes))
        return Reply(200)

    def _unregister(self, request: Request, groups: Groups) -> Reply:
        kind, name = groups
        if kind == "system":
            if name is None:
                self._regions.unregister_all()
            else:
                self._regions.unregister(name)
        return Reply(200)


def _check_method(request: Request, method: str, *, plain: bool) -> None:
    if request.method != method:
        raise refused(405, "Method Not Allowed", plain=plain)


def _field(document: Any, name: str) -> Any:
    if not isinstance(document, Mapping) or name not in document:
        raise refused(400, f"Shared memory register request has no '{name}' field")
    return document[name]


def _no_gpu(document: Any) -> ServerError:
    """A server without a GPU opens no handle, but it looks at its length."""
    handle = _field(document, "raw_handle")
    text = fields.string(_field(handle, "b64"))
    try:
        length = len(base64.b64decode(text, validate=True))
    except binascii.Error:
        length = 0
    if length != _CUDA_HANDLE_BYTES:
        return refused(
            400, "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"
        )
    return refused(400, "failed to register shared memory region: invalid args")
