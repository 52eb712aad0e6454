"""What programs that keep tritonclient do, one function each; see test_migration.py.

Runs in an environment that has tritonclient, with this source tree on its path: reads
one order a line, `{"scenario": …, "protocol": …, "http": …, "grpc": …}`, and answers
each with "ok" or the traceback as JSON. Refuses to start servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import sys
import time
import traceback
from typing import Any

import numpy as np

import shmlane
from shmlane import InferFailed, LeaseBusy, LeaseExpired, LeaseTimeout, UsageError
from shmlane.inventory import list_regions
from tests.server.tritonclient_user import (
    SLOW_MS,
    TIMED_OUT,
    Program,
    eventually,
    is_free,
    order,
    raises,
)

# --- what goes well -------------------------------------------------------------------


def values_are_right_in_many_requests_of_two_leases(program: Program) -> None:
    shapes = {"VALUES": (3, 3), "MARKS": (3, 2)}
    with (
        program.client() as client,
        program.session("rows", slots=2, shapes=shapes) as session,
        session.lease() as one,
        session.lease() as two,
    ):
        for turn in range(100):
            replies = []
            for number, lease in enumerate((one, two)):
                # The optional input is not always given, and batches differ.
                rows = 1 + (turn + number) % 3
                lease.view("VALUES", (rows, 3))[...] = turn + number / 2
                if turn >= 50:
                    lease.view("MARKS", (rows, 2))[...] = turn
                replies.append(client.infer("rows", **program.objects(lease)))
            for number, lease in enumerate((one, two)):
                result = lease.triton_result(replies[number])
                rows = 1 + (turn + number) % 3
                assert result["SUMS"].tolist() == [[3 * (turn + number / 2)]] * rows
                mark = turn if turn >= 50 else -1
                assert result["MARKED"].tolist() == [[mark, mark]] * rows
        stats = session.stats()
    assert (stats.drains, stats.registrations) == (0, 2)


def own_requests_and_tritonclients_take_turns_on_a_slot(program: Program) -> None:
    with program.client() as client, program.session("rows", slots=1) as session:
        for turn in range(20):
            with session.lease() as lease:
                lease["VALUES"][...] = turn
                reply = client.infer("rows", **program.objects(lease))
                result = lease.triton_result(reply)
                assert result["SUMS"][0, 0] == 3 * turn
                lease["VALUES"][...] = turn + 1
                assert lease.infer()["SUMS"][0, 0] == 3 * turn + 3
                with raises(LeaseExpired):
                    result["SUMS"]
        assert session.stats().connections == 1


def shapes_that_tritonclient_brought_are_not_taken_for_ones_own(
    program: Program,
) -> None:
    with (
        program.client() as client,
        program.session("moody", slots=1, outputs={"REPLY": (8,)}) as session,
        session.lease() as lease,
    ):
        for _ in range(3):
            # Twice: both of one's own requests know their replies then.
            for _ in range(2):
                order(lease, 1, count=4)
                assert lease.infer()["REPLY"].tolist() == [1] * 4
            order(lease, 2, count=8)
            reply = client.infer("moody", **program.objects(lease))
            assert lease.triton_result(reply)["REPLY"].tolist() == [2] * 8


def asyncio_clients_take_the_same_objects(program: Program) -> None:
    async def ask(client: Any, session: shmlane.Session, value: int) -> None:
        with session.lease() as lease:
            lease["VALUES"][...] = value
            reply = await client.infer("rows", **program.objects(lease))
            assert lease.triton_result(reply)["SUMS"][0, 0] == 3 * value

    async def main() -> None:
        api = importlib.import_module(f"tritonclient.{program.protocol}.aio")
        client = api.InferenceServerClient(program.url)
        try:
            with program.session("rows", slots=4) as session:
                for first in range(0, 40, 4):
                    numbers = range(first, first + 4)
                    await asyncio.gather(*(ask(client, session, n) for n in numbers))
        finally:
            await client.close()

    asyncio.run(main())


def sessions_for_asyncio_lend_their_slots_too(program: Program) -> None:
    async def ask(client: Any, session: shmlane.AsyncSession, value: int) -> None:
        protocol = program.protocol
        async with session.lease() as lease:
            lease["VALUES"][...] = value
            inputs = await lease.triton_inputs(protocol=protocol)
            outputs = await lease.triton_outputs(protocol=protocol)
            with raises(LeaseBusy, "lent to tritonclient"):
                await lease.infer()
            reply = await client.infer("rows", inputs, outputs=outputs)
            assert lease.triton_result(reply)["SUMS"][0, 0] == 3 * value

    async def main() -> None:
        api = importlib.import_module(f"tritonclient.{program.protocol}.aio")
        client = api.InferenceServerClient(program.url)
        try:
            async with shmlane.AsyncSession(
                program.session_url, "rows", slots=2
            ) as session:
                await asyncio.gather(*(ask(client, session, n) for n in range(20)))
                stats = session.stats()
                assert (stats.drains, stats.connections) == (0, 2)
                with contextlib.suppress(asyncio.CancelledError):
                    async with session.lease() as lease:
                        lease["VALUES"][...] = 1
                        await lease.triton_inputs(protocol=program.protocol)
                        raise asyncio.CancelledError
                async with session.lease(timeout=10), session.lease(timeout=10):
                    assert session.stats().drains == 1
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def text_and_outputs_of_unknown_size_come_whole(program: Program) -> None:
    words = [["ab", "größer", ""], ["c\0d", "e", "f" * 1000]]
    wanted = [[word.encode()[::-1] for word in row] for row in words]
    for outputs in (None, {"TOTALS": (2, 1), "BACKWARDS": 4096, "FLIPPED": (2, 2)}):
        with (
            program.client() as client,
            program.session("mixed", outputs=outputs) as session,
            session.lease() as lease,
        ):
            for turn in range(5):
                lease.write("NUMBERS", np.full((2, 4), turn, np.int32))
                lease.write("WORDS", words)
                reply = client.infer("mixed", **program.objects(lease))
                result = lease.triton_result(reply)
                assert result["TOTALS"].tolist() == [[4 * turn]] * 2
                assert result["BACKWARDS"].tolist() == wanted
                assert result["FLIPPED"].all()
                result["TOTALS"][...] = 0


def outputs_that_vary_in_size_come_each_time(program: Program) -> None:
    with program.client() as client, program.session("moody", slots=1) as session:
        with session.lease() as lease:
            for _ in range(3):
                order(lease, 1, count=4)
                assert lease.infer()["REPLY"].tolist() == [1] * 4
        for count in (4, 4000, 40):
            with session.lease() as lease:
                order(lease, 2, count=count)
                reply = client.infer("moody", **program.objects(lease))
                assert lease.triton_result(reply)["REPLY"].tolist() == [2] * count


def empty_tensors_and_sessions_without_shared_memory_work(program: Program) -> None:
    for memory, shape in (
        ("system", (1, 0, 3, 4)),
        ("wire", (1, 0, 3, 4)),
        ("wire", (1, 2, 3, 4)),
    ):
        with (
            program.client() as client,
            program.session("identity", memory=memory) as session,
            session.lease() as lease,
        ):
            values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
            lease.write("INPUT__0", values)
            reply = client.infer("identity", **program.objects(lease))
            result = lease.triton_result(reply)
            assert np.array_equal(result["OUTPUT__0"], values)


def outputs_that_were_not_asked_for_come_over_the_wire(program: Program) -> None:
    with (
        program.client() as client,
        program.session("rows") as session,
        session.lease() as lease,
    ):
        lease["VALUES"][...] = 5
        inputs = lease.triton_inputs(protocol=program.protocol)
        result = lease.triton_result(client.infer("rows", inputs))
        assert result["SUMS"][0, 0] == 15
        assert result["MARKED"].tolist() == [[-1, -1]]


# --- what goes wrong ------------------------------------------------------------------


def a_late_value_never_reaches_the_next_lease(program: Program) -> None:
    with (
        program.client() as client,
        program.session("moody", slots=1, outputs={"REPLY": (4,)}) as session,
    ):
        program.give_up(session, 111)
        assert session.stats().lost == 1
        with raises(LeaseTimeout, "lost"):
            session.lease(timeout=0.02)
        with session.lease() as lease:
            # The model has done with it by now, or it would come into this.
            order(lease, 222)
            reply = client.infer("moody", **program.objects(lease))
            view = lease.triton_result(reply)["REPLY"]
            quiet = time.monotonic() + 1.5 * SLOW_MS / 1000
            while time.monotonic() < quiet:
                assert view.tolist() == [222] * 4
                time.sleep(0.005)
        del view
        eventually(lambda: is_free(session), "the slot is free")
        assert session.stats().drains == 1


def other_slots_go_on_while_one_is_lost(program: Program) -> None:
    with (
        program.client() as client,
        program.session("moody", slots=2, outputs={"REPLY": (4,)}) as session,
    ):
        program.give_up(session, 111)
        for token in range(20):
            with session.lease() as lease:
                order(lease, token)
                reply = client.infer("moody", **program.objects(lease))
                assert lease.triton_result(reply)["REPLY"].tolist() == [token] * 4
        eventually(lambda: is_free(session), "the lost slot is free")
        assert session.stats().drains == 1


def a_request_sent_again_is_waited_for_twice(program: Program) -> None:
    with (
        program.client() as patient,
        program.client(gives_up=True) as client,
        program.session("moody", slots=1, outputs={"REPLY": (4,)}) as session,
    ):
        with session.lease() as lease:
            order(lease, 7, milliseconds=SLOW_MS)
            objects = program.objects(lease)
            with raises(Exception, *TIMED_OUT):
                client.infer("moody", **objects, **program.limit)
            reply = patient.infer("moody", **objects)
            assert lease.triton_result(reply)["REPLY"].tolist() == [7] * 4
            with raises(LeaseBusy):
                lease["ORDER"]
            with raises(UsageError, "no request of tritonclient"):
                lease.triton_result(reply)
        assert session.stats().lost == 1
        eventually(lambda: is_free(session), "the slot is free")
        assert session.stats().drains == 1


def a_refusal_of_the_model_gives_the_slot_back(program: Program) -> None:
    with (
        program.client() as client,
        program.session("moody", slots=1, outputs={"REPLY": (4,)}) as session,
    ):
        refused = raises(program.api.InferenceServerException, "moody takes no -1")
        with refused, session.lease() as lease:
            order(lease, -1)
            client.infer("moody", **program.objects(lease))
        with session.lease() as lease:
            order(lease, 3)
            assert lease.infer()["REPLY"].tolist() == [3] * 4
        assert session.stats().drains == 1


def objects_that_were_never_sent_are_of_no_use_afterwards(program: Program) -> None:
    with program.client() as client, program.session("rows", slots=1) as session:
        with session.lease() as lease:
            lease["VALUES"][...] = 1
            objects = program.objects(lease)
        with raises(LeaseExpired, "that is over"):
            client.infer("rows", **objects)
        with session.lease() as lease:
            lease["VALUES"][...] = 2
            objects = program.objects(lease)
            lease.triton_result(client.infer("rows", **objects))
            with raises(LeaseExpired, "that is over"):
                client.infer("rows", **objects)


def a_reply_to_another_request_is_refused(program: Program) -> None:
    with (
        program.client() as client,
        program.session("rows", slots=2) as session,
        session.lease() as lease,
        session.lease() as other,
    ):
        other["VALUES"][...] = 1
        foreign = client.infer("rows", **program.objects(other))
        lease["VALUES"][...] = 2
        objects = program.objects(lease)
        with raises(UsageError, "none was sent with the objects"):
            lease.triton_result(foreign)
        with raises(UsageError, "not the InferResult"):
            lease.triton_result({"SUMS": 3})
        moody = client.infer("moody", [moody_input(program)])
        reply = client.infer("rows", **objects)
        with raises(shmlane.ProtocolError, "model 'moody', not 'rows'"):
            lease.triton_result(moody)
        few = client.infer("rows", **other_objects(program, other, foreign))
        with raises(InferFailed, "without output 'MARKED'"):
            lease.triton_result(few)
        assert lease.triton_result(reply)["SUMS"][0, 0] == 6


def moody_input(program: Program) -> Any:
    made = program.api.InferInput("ORDER", [3], "INT32")
    made.set_data_from_numpy(np.array([1, 4, 0], np.int32))
    return made


def other_objects(program: Program, lease: shmlane.Lease, reply: Any) -> dict[str, Any]:
    """A request that asks for one output only."""
    lease.triton_result(reply)
    objects = program.objects(lease)
    return {
        "inputs": objects["inputs"],
        "outputs": [each for each in objects["outputs"] if each.name() == "SUMS"],
    }


def registrations_that_everybody_lost_come_back(program: Program) -> None:
    with program.client() as client, program.session("rows", slots=1) as session:
        client.unregister_system_shared_memory()
        refused = raises(program.api.InferenceServerException, "Unable to find")
        with refused, session.lease() as lease:
            lease["VALUES"][...] = 1
            client.infer("rows", **program.objects(lease))
        with session.lease() as lease:
            lease["VALUES"][...] = 2
            reply = client.infer("rows", **program.objects(lease))
            assert lease.triton_result(reply)["SUMS"][0, 0] == 6


# --- taking orders --------------------------------------------------------------------


def run(scenario: str, **where: str) -> None:
    globals()[scenario](Program(**where))
    own = [each.name for each in list_regions() if each.pid == os.getpid()]
    assert not own, f"regions are left behind: {own}"


def main() -> None:
    for line in sys.stdin:
        try:
            run(**json.loads(line))
            answer = "ok"
        except Exception:
            answer = traceback.format_exc()
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
