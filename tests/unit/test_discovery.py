"""Discovery: what a model is, and what a server has instead."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from shmlane.control import ask, discover
from shmlane.errors import (
    AccessRestricted,
    ModelNotReady,
    ProtocolError,
    ServerError,
    ShmlaneError,
    UsageError,
)
from shmlane.metadata import ModelMetadata, TensorSpec
from shmlane.wire import HttpRequests
from tests.unit.scripted import REQUESTS, Request, Script, error, http

RESTRICTED = error(403, "This API is restricted, expecting header 'K'")
OK = http(200)
MODEL: dict[str, Any] = {
    "name": "m",
    "versions": ["1", "2"],
    "platform": "python",
    "inputs": [
        {"name": "X", "datatype": "FP32", "shape": [-1, 3]},
        {"name": "MARK", "datatype": "INT8", "shape": [-1, 2]},
    ],
    "outputs": [{"name": "SUM", "datatype": "FP32", "shape": [-1, 1]}],
}
CONFIG: dict[str, Any] = {
    "max_batch_size": 8,
    "input": [{"name": "X"}, {"name": "MARK", "optional": True}],
}
INDEX = [
    {"name": "zoo", "version": "1", "state": "READY"},
    {"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": "no weights"},
    {"name": "m", "version": "2", "state": "LOADING"},
    {"name": "ant"},
]


def server(**differences: bytes) -> Callable[[bytes], bytes]:
    """A server with the model, but for what is given: by the last word of the path."""
    answers = {
        "v2": http(200, json.dumps({"name": "triton", "version": "2.51.0"})),
        "ready": OK,
        "m": http(200, json.dumps(MODEL)),
        "config": http(200, json.dumps(CONFIG)),
        "index": http(200, json.dumps(INDEX)),
    }
    answers |= differences

    def answer(request: bytes) -> bytes:
        word = Request.read(request).line.rpartition("/")[2]
        return answers["m" if word.isdigit() else word]

    return answer


def discovered(*, version: str = "", **differences: bytes) -> ModelMetadata:
    requests = HttpRequests("here:8000", "m", version=version)
    return Script(server(**differences)).run(discover(requests, "m", version=version))


def refusal_of(kind: type[ShmlaneError], **differences: Any) -> ShmlaneError:
    with pytest.raises(ShmlaneError) as caught:
        discovered(**differences)
    assert type(caught.value) is kind
    return caught.value


def test_discovery_joins_metadata_and_configuration() -> None:
    found = discovered()
    assert found.server_version == "2.51.0"
    assert found.versions == ("1", "2")
    assert found.inputs == {
        "X": TensorSpec("X", "FP32", (-1, 3), False, 8),
        "MARK": TensorSpec("MARK", "INT8", (-1, 2), True, 8),
    }
    assert found.outputs == {"SUM": TensorSpec("SUM", "FP32", (-1, 1), False, 8)}


def test_discovery_asks_for_the_version_wanted() -> None:
    script = Script(server())
    requests = HttpRequests("here:8000", "m", version="2")
    script.run(discover(requests, "m", version="2"))
    assert script.lines == [
        "GET /v2",
        "GET /v2/models/m/versions/2/ready",
        "GET /v2/models/m/versions/2",
        "GET /v2/models/m/versions/2/config",
    ]


@pytest.mark.parametrize("config", [RESTRICTED, error(400, "no"), http(500, "<html>")])
def test_a_refused_configuration_costs_only_what_it_would_say(config: bytes) -> None:
    found = discovered(config=config)
    assert found.max_batch_size == 0
    assert not found.inputs["MARK"].optional
    assert found.outputs["SUM"].shape == (-1, 1)


def test_a_missing_model_is_told_with_the_names_there_are() -> None:
    unknown = error(400, "Request for unknown model: 'm' is not found")
    others = json.dumps([entry for entry in INDEX if entry["name"] != "m"])
    missing = refusal_of(ModelNotReady, ready=unknown, index=http(200, others))
    assert str(missing) == "the server has no model 'm'; it has: ant, zoo."
    assert missing.context == {"model": "m", "models": ["ant", "zoo"]}
    assert not missing.retryable


def test_a_server_without_models_says_so() -> None:
    missing = refusal_of(ModelNotReady, ready=http(400), index=http(200, "[]"))
    assert "it has: none" in str(missing)


def test_a_model_that_is_not_ready_is_told_with_state_and_reason() -> None:
    late = refusal_of(ModelNotReady, ready=http(400))
    assert (
        "the server says: version 1: UNAVAILABLE no weights; version 2: LOADING."
        in str(late)
    )
    assert late.retryable


def test_a_version_that_is_missing_is_named() -> None:
    unknown = error(404, "Request for unknown model: 'm' version 7 is not found")
    late = refusal_of(ModelNotReady, version="7", ready=http(400), m=unknown)
    assert str(late).startswith("version 7 of model 'm' is not ready")
    assert late.context == {"model": "m", "version": "7"}


def test_a_model_that_was_never_loaded_is_told_so() -> None:
    index = http(200, json.dumps([{"name": "m"}]))
    late = refusal_of(ModelNotReady, ready=http(400), index=index)
    assert "version ?: not loaded." in str(late)


def test_a_server_that_does_not_list_its_models_is_believed() -> None:
    late = refusal_of(ModelNotReady, ready=http(400), index=RESTRICTED)
    assert "the server says: nothing" in str(late)
    assert late.retryable


@pytest.mark.parametrize(
    "about",
    [
        http(200, "<html>Welcome</html>"),
        http(200, '{"name": "triton"}'),
        http(200, "[]"),
        http(200),
        http(404, "Not Found"),
        http(302),
    ],
)
def test_something_else_than_triton_is_told(about: bytes) -> None:
    stranger = refusal_of(ProtocolError, v2=about)
    assert "GET /v2" in str(stranger) or "not JSON" in str(stranger)


def test_a_refusal_to_tell_the_version_is_told_in_the_servers_words() -> None:
    assert "unloading" in str(refusal_of(ServerError, v2=error(503, "unloading")))


@pytest.mark.parametrize("what", ["v2", "m"])
def test_a_restricted_api_is_told_as_such(what: str) -> None:
    restricted = refusal_of(AccessRestricted, **{what: RESTRICTED})
    assert "expecting header 'K'" in str(restricted)
    assert "Connection(headers=" in restricted.hint


def test_a_restricted_health_api_does_not_matter_for_a_model_that_is_there() -> None:
    assert discovered(ready=RESTRICTED).name == "m"


def test_a_decoupled_model_is_refused() -> None:
    config = CONFIG | {"model_transaction_policy": {"decoupled": True}}
    refused = refusal_of(UsageError, config=http(200, json.dumps(config)))
    assert "gRPC streams only" in str(refused)


def test_a_talk_must_be_driven_with_replies() -> None:
    talk = ask(REQUESTS.server_metadata())
    next(talk)
    with pytest.raises(TypeError, match="must send a reply"):
        talk.send(None)
