"""A push up to 1 MB that waits for nothing is decided, applied and answered where it is read: no task takes it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

from ps_protocol.cluster.answers import Outcome
from ps_protocol.cluster.requests import Contribution, PushHeader, ReleaseRequest
from ps_protocol.errors import InternalError, InvalidRequest, NonFiniteGradient, Unavailable
from ps_protocol.model.spec import Consistency, Mode, NonFinite
from ps_protocol.wire.carrier import PlainCarrier
from ps_protocol.wire.convert.step import request_to_bytes
from ps_protocol.wire.socket_messages import framed
from ps_server.cli.options.storage import Durability, StorageConfig
from ps_server.consistency import Position, PushInfo, WorkerKey
from ps_server.log.durable import DurableLog
from ps_server.log.entries import AppliedUpdate, MemoryLog
from ps_server.optimizers.undo import StepSkipped
from ps_server.shard.byte_budget import ByteBudget
from ps_server.shard.execution.executor import INLINE_WORK_BYTES, ShardExecutor
from ps_server.shard.step.model import ShardModel
from ps_server.shard.step.push import IncomingPush
from ps_server.shard.step.stream import PIPELINE_DEPTH, StepStream
from ps_server.state.replica import Replica, Step
from tests.log.support import opened
from tests.support.length import few
from tests.support.shards import TestShard, wait_until
from tests.support.side_channels import STALLED_SOON
from tests.transports.support import Line, assert_same, begin, is_idle, line, running_shard, trained, whole_numbers

SMALL, MIDDLE = ((40, 50), (3,)), ((300, 701), (3,))
"""In a message, and behind it or in memory that is shared."""

pytestmark = pytest.mark.usefixtures("loop", "quiet")


@pytest.fixture(params=["bulk", "shm"])
def side(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=few([MIDDLE, SMALL]), ids=few(["middle", "small"]))
def shapes(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(autouse=True)
def by_tasks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The messages that a task has taken."""
    taken, take = [], StepStream._take

    async def noting(stream: StepStream, message: Any) -> Any:
        taken.append(message)
        return await take(stream, message)

    monkeypatch.setattr(StepStream, "_take", noting)
    return taken


@pytest.mark.parametrize("finite", [True, False], ids=["its worker has looked for NaN", "the shard looks"])
def test_a_small_push_takes_no_task_and_answers_with_what_it_made(side, shapes, by_tasks, finite):
    with running_shard() as shard:
        model, initial = begin(shard, *shapes)
        steps = [whole_numbers(model, seed) for seed in range(1, 5)]
        with line(shard, model, side) as worker:
            for number, step in enumerate(steps, 1):
                answer = worker.exchange(step, finite=finite)
                assert (answer.outcome, answer.version, answer.clock) == (Outcome.APPLIED, number, number)
                assert_same(worker.values, trained(initial, *steps[:number]))
        assert by_tasks == []
        assert model.pool.in_use == 0


def test_pushes_that_are_sent_before_the_answers_are_read_are_answered_in_order(side):
    with running_shard() as shard:
        model, initial = begin(shard, *SMALL)
        with line(shard, model, "bulk") as worker:
            steps = [whole_numbers(model, seed) for seed in range(1, 13)]
            for step in steps:
                worker.push(step, finite=True)
            assert [worker.receive().clock for _ in steps] == list(range(1, 13))
            assert_same(worker.values, trained(initial, *steps))


def test_a_push_that_is_refused_is_answered_and_the_stream_goes_on(side, shapes, by_tasks):
    with running_shard() as shard:
        model, initial = begin(shard, *shapes)
        step = whole_numbers(model, 1)
        with line(shard, model, side) as worker:
            worker.exchange(step, finite=True)
            answer = worker.exchange(step, finite=True, sequence=9, clock=1)
            assert answer.outcome is Outcome.REFUSED
            assert isinstance(answer.error, InvalidRequest)
            worker.sequence = 9
            worker.exchange(step, finite=True)
            assert_same(worker.values, trained(initial, step, step))
        assert by_tasks == []
        assert shard.counters.refused.total() == 1


def test_a_combined_push_takes_no_task_and_one_that_is_not_taken_as_one_brings_nothing(side, shapes, by_tasks):
    with running_shard(live={0: 1, 1: 1}) as shard:
        model, initial = begin(shard, *shapes)
        step = whole_numbers(model, 1)
        other = Contribution((1, 1), 1, 0, 1, 0)
        with line(shard, model, side) as worker, line(shard, model, side, rank=1) as single:
            answer = worker.exchange(step, finite=True, weight=2.0, contributions=(other,))
            assert answer.outcome is Outcome.APPLIED
            assert_same(worker.values, trained(initial, step))
            assert single.exchange(step, finite=True).outcome is Outcome.DUPLICATE
            worker.forget()
            answer = worker.exchange(step, finite=True, weight=2.0, contributions=(other,))
            assert (answer.outcome, answer.payload_bytes) == (Outcome.SEPARATE, 0)
            answer = worker.exchange(step, finite=True, sequence=2, clock=2)
            assert answer.outcome is Outcome.APPLIED
            assert_same(worker.values, trained(initial, step, step))
        assert by_tasks == []
        assert model.pool.in_use == 0


@pytest.mark.parametrize("policy", [NonFinite.REFUSE, NonFinite.SKIP])
def test_a_push_with_nan_is_refused_or_skipped_as_the_policy_says(side, shapes, policy):
    with running_shard() as shard:
        model, initial = begin(shard, *shapes, nonfinite=policy)
        step = whole_numbers(model, 1)
        wrong = [torch.full_like(gradient, torch.nan) for gradient in step]
        with line(shard, model, side) as worker:
            answer = worker.exchange(wrong)
            assert answer.outcome is (Outcome.REFUSED if policy is NonFinite.REFUSE else Outcome.SKIPPED)
            assert isinstance(answer.error, NonFiniteGradient) == (policy is NonFinite.REFUSE)
            worker.exchange(step)
            assert_same(worker.values, trained(initial, step))
        assert model.pool.in_use == 0


@pytest.mark.parametrize("header", [{"absent": [7]}, {"weight": -1.0}, {"segment": 5}], ids=str)
def test_a_header_that_breaks_the_protocol_ends_the_stream_and_keeps_nothing(side, shapes, header):
    with running_shard() as shard:
        model, _ = begin(shard, *shapes)
        with line(shard, model, side) as worker:
            if "segment" in header and side == "bulk":
                worker.carrier._send(PushHeader(sequence=1, clock=1, finite=True, **header))
            else:
                worker.push(whole_numbers(model, 1), finite=True, **header)
            with pytest.raises(InvalidRequest):
                worker.receive()
        wait_until(lambda: (model.pool.in_use, model.pool.spare) == (0, 0))
        assert model.tracker.version == 0


def test_an_update_that_fails_stops_the_model_and_its_worker_is_told(side, shapes, monkeypatch, caplog):
    def fails(replica: Replica, step: Step) -> None:
        raise RuntimeError("unexpected")

    with running_shard() as shard:
        model, _ = begin(shard, *shapes)
        monkeypatch.setattr(Replica, "apply", fails)
        with line(shard, model, side) as worker, pytest.raises(InternalError, match="stopped model 'model'"):
            worker.exchange(whole_numbers(model, 1), finite=True)
    caplog.clear()  # it is logged as an error


def test_in_sync_a_push_waits_for_the_others_and_is_answered_by_the_writing_task(side, shapes, by_tasks):
    with running_shard(live={0: 1, 1: 1}, consistency=Consistency(Mode.SYNC)) as shard:
        model, initial = begin(shard, *shapes)
        one, two = whole_numbers(model, 1), whole_numbers(model, 2)
        with line(shard, model, side) as first, line(shard, model, side, rank=1) as second:
            first.push(one, finite=True)
            wait_until(lambda: model.parked_pulls == 1)
            second.push(two, finite=True)
            assert first.receive().version == second.receive().version == 1
            mean = [(a + b) / 2 for a, b in zip(one, two, strict=True)]
            assert_same(first.values, trained(initial, mean))
            assert_same(second.values, trained(initial, mean))
        assert by_tasks == []


def test_a_push_for_which_the_log_has_no_room_yet_goes_the_general_way(side, shapes, by_tasks):
    class Waits(MemoryLog):
        def reserve_now(self, nbytes: int) -> bool:
            return False

    with running_shard(log=Waits()) as shard:
        model, initial = begin(shard, *shapes)
        step = whole_numbers(model, 1)
        with line(shard, model, side) as worker:
            worker.exchange(step, finite=True)
            assert_same(worker.values, trained(initial, step))
        assert len(by_tasks) == 1


def test_an_answer_that_the_socket_does_not_take_whole_is_sent_by_the_writing_task(side, shapes, monkeypatch):
    send_now = PlainCarrier.send_now

    def takes_little(carrier: PlainCarrier, pieces: Any, descriptors: Any = ()) -> Any:
        whole = memoryview(b"".join(pieces))
        return [*send_now(carrier, [whole[:99]], descriptors), whole[99:]]

    with running_shard() as shard:
        model, initial = begin(shard, *shapes)
        steps = [whole_numbers(model, seed) for seed in range(1, 4)]
        with line(shard, model, side) as worker:
            own = worker.carrier._carrier
            monkeypatch.setattr(own, "send_now", lambda pieces: send_now(own, pieces))
            monkeypatch.setattr(PlainCarrier, "send_now", takes_little)
            for step in steps:
                worker.exchange(step, finite=True)
            assert_same(worker.values, trained(initial, *steps))


def test_pushes_that_come_in_one_turn_of_the_event_loop_are_decided_together_and_applied_in_their_order(
    side, shapes, monkeypatch
):
    together, decide = [], ShardModel._decide

    def noting(model: ShardModel, pushes: Any) -> Any:
        together.append([push.info.worker.rank for push in pushes])
        return decide(model, pushes)

    with running_shard(live={0: 1, 1: 1, 2: 1}) as shard, ExitStack() as stack:
        model, initial = begin(shard, *shapes)
        lines = [stack.enter_context(line(shard, model, side, rank=rank)) for rank in range(3)]
        steps = [whole_numbers(model, seed) for seed in range(1, 7)]
        for worker, step in zip(lines, steps[:3], strict=True):
            worker.exchange(step, finite=True)
        monkeypatch.setattr(ShardModel, "_decide", noting)
        with held_up(shard):
            for worker, step in zip(lines, steps[3:], strict=True):
                worker.push(step, finite=True)
        assert [worker.receive().version for worker in lines] == [6, 6, 6]
        for worker in lines:
            assert_same(worker.values, trained(initial, *steps))
        assert [sorted(each) for each in together] == [[0, 1, 2]]


@contextmanager
def held_up(shard: TestShard) -> Iterator[None]:
    """The event loop of ``shard`` does nothing meanwhile."""
    begun, go = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go.wait()

    shard.loop.loop.call_soon_threadsafe(hold)
    begun.wait()
    try:
        yield
    finally:
        go.set()


@pytest.mark.parametrize("event", ["pause", "members", "another push", "stop"])
def test_what_was_gathered_is_decided_before_anything_else_is_and_given_up_when_the_model_stops(event):
    with running_shard(live={0: 1, 1: 1}) as shard:
        model, _ = begin(shard, *SMALL)

        def push(rank: int) -> IncomingPush:
            info = PushInfo(WorkerKey(rank, 1), 1, Position(0, 1), 0)
            region = model.pool.take()
            region.data.zero_()
            return IncomingPush(info, region, frozenset(), (), finite=True)

        async def scenario() -> None:
            order: list[int] = []
            for rank in range(2):
                model.attach(WorkerKey(rank, 1), 0)
            first, second = push(0), push(1)
            assert model.gather(first, lambda each: order.append(each.info.worker.rank))
            match event:
                case "pause":
                    model.gate.pause()
                case "members":
                    model.members({1: 1})
                case "another push":
                    await model.push(second)
                case _:
                    model.stop(InternalError("it stops"))
            assert order == ([] if event == "stop" else [0])
            assert model.tracker.version == {"stop": 0, "another push": 2}.get(event, 1)
            if event != "another push":
                model.pool.give(second.region)
            await asyncio.sleep(0)
            assert order == ([] if event == "stop" else [0])
            assert model.pool.in_use == 0

        shard.loop.run(scenario())


def in_one_write(worker: Line, send: Callable[[], None]) -> None:
    """What ``send`` sends reaches the shard in one read."""
    own, parts = worker.carrier._carrier, list[bytes]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own, "send_now", lambda pieces: parts.append(b"".join(pieces)) or [])
        send()
    own.send_all([b"".join(parts)])


def test_what_comes_behind_a_push_that_waits_is_answered_behind_it_and_others_get_their_answers(side):
    with running_shard(live={0: 1, 1: 1}, consistency=Consistency(Mode.SYNC)) as shard:
        model, initial = begin(shard, *SMALL)
        one, two = whole_numbers(model, 1), whole_numbers(model, 2)
        with line(shard, model, side) as first, line(shard, model, side, rank=1) as second:

            def send() -> None:
                first.carrier._send(ReleaseRequest())  # taken by the task, which goes on without a pause
                first.push(one, finite=True)
                for _ in range(PIPELINE_DEPTH + 2):
                    first.carrier.fetch()

            in_one_write(first, send)
            wait_until(lambda: model.parked_pulls == 1)
            second.push(two, finite=True)
            assert second.receive().version == 1
            assert [first.receive().sequence for _ in range(PIPELINE_DEPTH + 3)] == [1, *[0] * (PIPELINE_DEPTH + 2)]
            mean = [(a + b) / 2 for a, b in zip(one, two, strict=True)]
            assert_same(first.values, trained(initial, mean))


@pytest.mark.parametrize("kind", ["bulk", "shm", "grpc"])
def test_a_worker_that_sends_without_a_pause_leaves_others_their_turn(kind):
    with running_shard() as shard:
        model, _ = begin(shard, (3,))
        step, count, versions = whole_numbers(model, 1), 200, list[int]()

        def turn() -> None:
            versions.append(model.tracker.version)
            if versions[-1] < count:
                shard.loop.loop.call_soon(turn)

        with line(shard, model, kind) as worker:
            with held_up(shard):
                for _ in range(count):
                    worker.push(step, finite=True)
                shard.loop.loop.call_soon_threadsafe(turn)
            assert [worker.receive().clock for _ in range(count)] == list(range(1, count + 1))
        assert max(after - before for before, after in pairwise(versions)) <= PIPELINE_DEPTH


@pytest.mark.parametrize("skips", [True, False], ids=["its step is undone", "the model stops"])
def test_a_push_that_fails_amid_others_of_its_pass_takes_none_with_it_or_all_are_refused(
    side, shapes, skips, monkeypatch, caplog
):
    apply, made = Replica.apply, list[Step]()

    def fails(replica: Replica, step: Step) -> None:
        made.append(step)
        if len(made) == 5:
            raise StepSkipped("it raises") if skips else RuntimeError("unexpected")
        apply(replica, step)

    monkeypatch.setattr(Replica, "apply", fails)
    with running_shard(live={0: 1, 1: 1, 2: 1}) as shard, ExitStack() as stack:
        model, initial = begin(shard, *shapes)
        lines = [stack.enter_context(line(shard, model, side, rank=rank)) for rank in range(3)]
        steps = [whole_numbers(model, seed) for seed in range(1, 7)]
        for worker, step in zip(lines, steps[:3], strict=True):
            worker.exchange(step, finite=True)
        order = noted_order(monkeypatch)
        with held_up(shard):
            for worker, step in zip(lines, steps[3:], strict=True):
                worker.push(step, finite=True)
        if skips:
            outcomes = [worker.receive().outcome for worker in lines]
            assert [outcomes[rank] for rank in order] == [Outcome.APPLIED, Outcome.SKIPPED, Outcome.APPLIED]
            kept = [step for rank, step in enumerate(steps[3:]) if rank != order[1]]
            assert_same(lines[0].values, trained(initial, *steps[:3], *kept))
        else:
            for worker in lines:  # none is told that it was applied
                with pytest.raises(InternalError, match="stopped model 'model'"):
                    worker.receive()
        wait_until(lambda: model.pool.in_use == 0)
    caplog.clear()  # it is logged as an error


def noted_order(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks of the pushes that are decided, in their order."""
    order, decide = list[int](), ShardModel._decide

    def noting(model: ShardModel, pushes: Any) -> Any:
        order.extend(push.info.worker.rank for push in pushes)
        return decide(model, pushes)

    monkeypatch.setattr(ShardModel, "_decide", noting)
    return order


def test_pushes_that_come_while_an_update_is_made_are_decided_together_once_it_is(side, shapes, monkeypatch, by_tasks):
    apply, go, begun, together = Replica.apply, threading.Event(), threading.Event(), list[list[int]]()
    decide = ShardModel._decide

    def slow(replica: Replica, step: Step) -> None:
        begun.set()
        go.wait()
        apply(replica, step)

    def noting(model: ShardModel, pushes: Any) -> Any:
        together.append([push.info.worker.rank for push in pushes])
        return decide(model, pushes)

    def submit(executor: ShardExecutor, work: Any, nbytes: int, **named: Any) -> Any:
        return make(executor, work, INLINE_WORK_BYTES)  # in the thread

    make = ShardExecutor.submit
    with running_shard(live={0: 1, 1: 1, 2: 1, 3: 1}) as shard, ExitStack() as stack:
        model, initial = begin(shard, *shapes)
        lines = [stack.enter_context(line(shard, model, side, rank=rank)) for rank in range(4)]
        steps = [whole_numbers(model, seed) for seed in range(1, 5)]
        monkeypatch.setattr(ShardModel, "_decide", noting)
        monkeypatch.setattr(ShardExecutor, "submit", submit)
        monkeypatch.setattr(Replica, "apply", slow)
        lines[0].push(steps[0], finite=True)
        begun.wait()
        for worker, step in zip(lines[1:], steps[1:], strict=True):
            worker.push(step, finite=True)
        wait_until(lambda: len(model._gathered) == 3)
        go.set()
        assert [worker.receive().version for worker in lines] == [1, 4, 4, 4]
        for worker in lines[1:]:
            assert_same(worker.values, trained(initial, *steps))
    assert [sorted(each) for each in together] == [[0], [1, 2, 3]]
    assert by_tasks == []


def uploads(shard: TestShard) -> ByteBudget:
    return shard.registry.context.budgets.uploads


def test_a_worker_that_stalls_in_the_middle_of_a_push_loses_its_stream_and_nothing_is_kept(monkeypatch):
    taken, take_now = list[int](), ByteBudget.take_now

    def noting(budget: ByteBudget, who: Any, size_bytes: int) -> bool:
        taken.append(size_bytes)
        return take_now(budget, who, size_bytes)

    monkeypatch.setattr(ByteBudget, "take_now", noting)
    with running_shard(side_channel_config=STALLED_SOON) as shard:
        model, _ = begin(shard, *MIDDLE)
        with line(shard, model, "bulk") as worker:
            message = request_to_bytes(PushHeader(sequence=1, clock=1, finite=True))
            worker.carrier._carrier.send_all([framed(message), bytes(100_000)])
            with pytest.raises(Unavailable):
                worker.receive()
            assert taken == [model.layout.region_bytes]
        wait_until(lambda: is_idle(model) and uploads(shard).used_bytes == 0)
        assert model.tracker.version == 0


def test_a_worker_that_ends_in_the_middle_of_a_push_leaves_nothing():
    with running_shard() as shard:
        model, _ = begin(shard, *MIDDLE)
        with line(shard, model, "bulk") as worker:
            message = request_to_bytes(PushHeader(sequence=1, clock=1, finite=True))
            worker.carrier._carrier.send_all([framed(message), bytes(100_000)])
            wait_until(lambda: uploads(shard).used_bytes == model.layout.region_bytes)
        wait_until(lambda: is_idle(model) and uploads(shard).used_bytes == 0)


def test_a_push_for_which_the_budget_of_uploads_has_no_room_is_taken_by_a_task(by_tasks):
    with running_shard(upload_bytes=1_000_000) as shard:
        model, initial = begin(shard, *MIDDLE)
        step = whole_numbers(model, 1)
        with line(shard, model, "bulk") as worker:
            worker.exchange(step, finite=True)
            assert_same(worker.values, trained(initial, step))
    assert len(by_tasks) == 1


def test_values_that_a_worker_fetches_before_it_has_read_an_answer_do_not_touch_it():
    with running_shard(live={0: 1, 1: 1}) as shard:
        model, initial = begin(shard, *MIDDLE)
        one, two = whole_numbers(model, 1), whole_numbers(model, 2)
        with line(shard, model, "shm") as worker, line(shard, model, "shm", rank=1) as other:
            worker.push(one, finite=True)
            wait_until(lambda: model.tracker.version == 1)
            other.exchange(two, finite=True)
            worker.carrier.fetch()
            assert worker.receive().version == 1
            assert_same(worker.values, trained(initial, one))
            assert worker.receive().version == 2
            assert_same(worker.values, trained(initial, one, two))


def test_what_comes_behind_a_push_that_waits_for_an_update_is_answered_behind_it(side, monkeypatch):
    apply, go, begun, make = Replica.apply, threading.Event(), threading.Event(), ShardExecutor.submit

    def slow(replica: Replica, step: Step) -> None:
        begun.set()
        go.wait()
        apply(replica, step)

    def submit(executor: ShardExecutor, work: Any, nbytes: int, **named: Any) -> Any:
        return make(executor, work, INLINE_WORK_BYTES)  # in the thread

    with running_shard(live={0: 1, 1: 1}) as shard:
        model, initial = begin(shard, *SMALL)
        one, two = whole_numbers(model, 1), whole_numbers(model, 2)
        with line(shard, model, side) as first, line(shard, model, side, rank=1) as second:
            monkeypatch.setattr(ShardExecutor, "submit", submit)
            monkeypatch.setattr(Replica, "apply", slow)
            first.push(one, finite=True)
            begun.wait()
            second.push(two, finite=True)
            wait_until(lambda: len(model._gathered) == 1)
            for _ in range(PIPELINE_DEPTH + 2):
                second.carrier.fetch()
            wait_until(lambda: model.tracker.version == 2)  # it was decided before what came behind it
            go.set()
            assert first.receive().version == 2
            assert [second.receive().sequence for _ in range(PIPELINE_DEPTH + 3)] == [1, *[0] * (PIPELINE_DEPTH + 2)]
            assert_same(second.values, trained(initial, one, two))


def test_pushes_that_come_while_the_disk_is_waited_for_are_logged_together_and_then_made(
    side, shapes, tmp_path, monkeypatch, by_tasks
):
    write, go, begun, together = DurableLog.append_all, threading.Event(), threading.Event(), list[list[int]]()

    def slow(log: DurableLog, entries: Any) -> None:
        if isinstance(entries[0], AppliedUpdate):
            together.append([each.pushes[0].worker.rank for each in entries])
            begun.set()
            go.wait()
        write(log, entries)

    config = StorageConfig(Durability.DURABLE, tmp_path, fsync=True)
    with running_shard(live={0: 1, 1: 1, 2: 1, 3: 1}, storage_config=config) as shard, ExitStack() as stack:
        model, initial = begin(shard, *shapes)
        lines = [stack.enter_context(line(shard, model, side, rank=rank)) for rank in range(4)]
        steps = [whole_numbers(model, seed) for seed in range(1, 5)]
        monkeypatch.setattr(DurableLog, "append_all", slow)
        lines[0].push(steps[0], finite=True)
        begun.wait()
        for worker, step in zip(lines[1:], steps[1:], strict=True):
            worker.push(step, finite=True)
        wait_until(lambda: len(model._gathered) == 3)
        go.set()
        assert [worker.receive().version for worker in lines] == [1, 4, 4, 4]
        assert_same(lines[1].values, trained(initial, *steps))
        assert model.pool.in_use == 0
    assert [sorted(each) for each in together] == [[0], [1, 2, 3]]
    assert by_tasks == []
    with opened(tmp_path) as (_, found):
        assert_same([found.models["model"].replica.region.slice(0)], trained(initial, *steps)[:1])
