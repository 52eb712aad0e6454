"""Programs that keep tritonclient: their requests on a lease's slot, and what if not.

tritonclient pins versions of what others need here, so it runs where the benchmark has
it: in an environment of its own, in one process for all these tests.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmlane.bench.worker import TRITONCLIENT
from shmlane.server import TritonServer, demo_models
from shmlane.server.managed import isolated_python
from shmlane.server.programs import clean_environment
from tests.sessions import registered, write_models
from tests.tensor_models import write_tensor_models

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = [
    "values_are_right_in_many_requests_of_two_leases",
    "own_requests_and_tritonclients_take_turns_on_a_slot",
    "shapes_that_tritonclient_brought_are_not_taken_for_ones_own",
    "asyncio_clients_take_the_same_objects",
    "sessions_for_asyncio_lend_their_slots_too",
    "text_and_outputs_of_unknown_size_come_whole",
    "outputs_that_vary_in_size_come_each_time",
    "empty_tensors_and_sessions_without_shared_memory_work",
    "outputs_that_were_not_asked_for_come_over_the_wire",
    "a_late_value_never_reaches_the_next_lease",
    "other_slots_go_on_while_one_is_lost",
    "a_request_sent_again_is_waited_for_twice",
    "a_refusal_of_the_model_gives_the_slot_back",
    "objects_that_were_never_sent_are_of_no_use_afterwards",
    "a_reply_to_another_request_is_refused",
    "registrations_that_everybody_lost_come_back",
]


@pytest.fixture(scope="module")
def lent_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """`rows`, `mixed`, `identity`, and a `moody` that runs two requests at once."""
    folder = tmp_path_factory.mktemp("lent")
    models = write_models(folder / "sessions", "rows", "moody")
    config = models / "moody" / "config.pbtxt"
    twice = "instance_group [{ kind: KIND_CPU count: 2 }]\n"
    config.write_text(config.read_text() + twice)
    mixed = write_tensor_models(folder / "tensors") / "mixed"
    mixed.rename(models / "mixed")
    with TritonServer(
        [*demo_models("identity"), models], extra_args=["--exit-timeout-secs=1"]
    ) as server:
        yield server
        assert server.is_alive


@pytest.fixture(scope="module")
def program() -> Iterator[subprocess.Popen[str]]:
    """The program, which carries out one scenario a line."""
    python = isolated_python("tritonclient", [TRITONCLIENT])
    with subprocess.Popen(
        [str(python), "-m", "tests.server.tritonclient_program"],
        env={**clean_environment(), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=20) == 0


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_with_tritonclient(
    scenario: str,
    protocol: str,
    lent_server: TritonServer,
    program: subprocess.Popen[str],
) -> None:
    before = registered(lent_server)
    order = {
        "scenario": scenario,
        "protocol": protocol,
        "http": lent_server.http_url,
        "grpc": lent_server.grpc_url,
    }
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write(f"{json.dumps(order)}\n")
    program.stdin.flush()
    answer = json.loads(program.stdout.readline() or '"the program has ended"')
    assert answer == "ok", answer
    assert registered(lent_server) <= before
