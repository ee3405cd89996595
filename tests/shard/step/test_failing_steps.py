"""A step that raises is skipped, by the shard and by a replay of its log; the model goes on for everybody."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from ps_protocol.errors import InvalidRequest, PsError, UnsupportedOptimizer
from ps_protocol.model.optimizers import ELEMENTWISE
from ps_protocol.model.spec import Consistency, Mode, NonFinite
from ps_protocol.v1 import common_pb2, shard_pb2_grpc
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert.errors import from_detail
from ps_protocol.wire.convert.options import options_to_pb
from ps_server.log.entries import Loaded
from ps_server.optimizers.fused import FusedStep
from ps_server.optimizers.shard_optimizer import ShardOptimizer
from ps_server.optimizers.state import StateKey
from tests.optimizers.test_option_ranges import TRIGGERS, _defaults, _hostile
from tests.shard.disks import held, shard_on
from tests.support.length import choose
from tests.support.seeds import seeded
from tests.support.shards import (
    StubStream,
    TestShard,
    error_of,
    flat,
    gradients,
    running_shard,
    simple_spec,
    start,
    whole_map,
)

pytestmark = pytest.mark.usefixtures("disk")

MAGIC = 12345.0


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments are checked as by a version that knew no ranges: what torch takes when it makes an optimizer."""
    monkeypatch.setattr("ps_server.shard.step.options.require_in_range", lambda spec, options: None)


def _state(model: Any) -> list[tuple[StateKey, bytes]]:
    return [(key, bytes(tensor.numpy().tobytes())) for key, tensor in model._applier.replica.state()]


def _same(shard: TestShard, model: Any, again: TestShard, other: Any) -> None:
    assert torch.equal(held(again, other), held(shard, model))
    assert _state(other) == _state(model)
    assert other.tracker.persisted_state() == model.tracker.persisted_state()


RAISING = [each for each in TRIGGERS if each[0] in ("RMSprop", "ASGD", "NAdam", "Rprop") and "betas" not in each[1]]


@pytest.mark.usefixtures("older")
@pytest.mark.parametrize(("name", "options"), RAISING, ids=[f"{name}-{next(iter(o))}" for name, o in RAISING])
def test_a_step_that_raises_leaves_nothing_and_the_others_train_on(tmp_path, killed, name, options):
    live = {0: 1, 1: 2}
    with shard_on(tmp_path / "a", live) as shard:
        model, _ = start(shard, optimizer=f"torch.optim.{name}", **_defaults(name))
        payload = flat(model.layout, *gradients(model, 1))
        good, bad = StubStream(shard, 0, 1), StubStream(shard, 1, 2)
        assert good.exchange(payload)[0].outcome == pb.OUTCOME_APPLIED
        before, state = held(shard, model), _state(model)
        result, parameters = bad.exchange(payload, groups=[options_to_pb(options)])
        assert result.outcome == pb.OUTCOME_SKIPPED
        error = from_detail(result.error)
        assert isinstance(error, UnsupportedOptimizer)
        assert "as before it" in error.message
        assert error.actual
        assert error.remedy
        assert parameters == bytes(before.numpy())
        assert (torch.equal(held(shard, model), before), _state(model)) == (True, state)
        assert good.exchange(payload)[0].outcome == pb.OUTCOME_APPLIED
        assert bad.exchange(payload)[0].outcome == pb.OUTCOME_SKIPPED, "the arguments have not changed"
        assert bad.exchange(payload, groups=[options_to_pb({})])[0].outcome == pb.OUTCOME_APPLIED
        outcomes = model.tracker.counts.outcomes
        assert (outcomes["applied"], outcomes["failed"], model.tracker.version) == (3, 2, 5)
        assert shard.counters.dropped == 2, "psctl status shows it"
        with killed(shard, live) as again:
            _same(shard, model, again, again.place(model.layout.shard_map))
        good.end()
        bad.end()


@pytest.mark.usefixtures("older")
def test_in_sync_all_workers_of_the_step_are_told(tmp_path, killed):
    live, sync = {0: 1, 1: 2}, Consistency(Mode.SYNC)
    with shard_on(tmp_path / "a", live, sync) as shard:
        model, _ = start(shard, optimizer="torch.optim.RMSprop", lr=0.1, alpha=0.9)
        streams = [StubStream(shard, rank, rank + 1) for rank in live]
        before = held(shard, model)
        for stream in streams:
            stream.push(flat(model.layout, *gradients(model, 1)), groups=[options_to_pb({"alpha": 1e308})])
        results = [stream.result()[0] for stream in streams]
        assert [(r.outcome, r.HasField("error")) for r in results] == [(pb.OUTCOME_SKIPPED, True)] * 2
        assert torch.equal(held(shard, model), before)
        with killed(shard, live, sync) as again:
            _same(shard, model, again, again.place(model.layout.shard_map))
        for stream in streams:
            stream.end()


@pytest.mark.usefixtures("older")
def test_all_workers_of_a_combined_push_are_told():
    live = {0: 1, 1: 2}
    with running_shard(live) as shard:
        model, _ = start(shard, optimizer="torch.optim.RMSprop", lr=0.1, alpha=0.9)
        sender, other = (StubStream(shard, rank, rank + 1) for rank in live)
        payload = flat(model.layout, *gradients(model, 1))
        whole = [pb.PushContribution(worker=pb.WorkerId(rank=1, incarnation=2), sequence=1, clock=1)]
        bad = [options_to_pb({"alpha": 1e308})]
        for result, _ in (
            sender.exchange(payload, groups=bad, weight=2.0, contributions=whole),
            other.exchange(payload),  # by itself, as after the death of the sender
        ):
            assert (result.outcome, result.HasField("error")) == (pb.OUTCOME_SKIPPED, True)
        assert model.tracker.counts.outcomes["failed"] == 1


def test_an_argument_out_of_range_is_refused_and_logs_nothing():
    with running_shard({0: 1, 1: 2}) as shard:
        model, _ = start(shard, optimizer="torch.optim.RMSprop", lr=0.1, alpha=0.9)
        payload, good = flat(model.layout, *gradients(model, 1)), StubStream(shard, 0, 1)
        number, bad = shard.registry.context.log.number, StubStream(shard, 1, 2)
        with pytest.raises(grpc.RpcError) as refused:
            bad.exchange(payload, groups=[options_to_pb({"alpha": 1e308})])
        assert "'alpha'" in error_of(refused.value).message
        assert shard.registry.context.log.number == number
        assert good.exchange(payload)[0].outcome == pb.OUTCOME_APPLIED
        good.end()


# A step that makes a number complex warns; a shard lets warnings be warnings.
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("checks", ["ours", "torch's"])
def test_hostile_arguments_at_random_never_stop_a_model_and_a_replay_gives_the_same_bytes(
    tmp_path, killed, monkeypatch, checks
):
    chance = seeded()
    if checks == "torch's":
        monkeypatch.setattr("ps_server.shard.step.options.require_in_range", lambda spec, options: None)
    live = {0: 1, 1: 2}
    name = chance.choice(sorted(each.rpartition(".")[2] for each in ELEMENTWISE))
    defaults = _defaults(name)
    with shard_on(tmp_path / "a", live) as shard:
        model, _ = start(shard, optimizer=f"torch.optim.{name}", nonfinite=NonFinite.ALLOW, **defaults)
        good, bad = StubStream(shard, 0, 1), StubStream(shard, 1, 2)
        for step in range(choose(60, 30)):
            size = chance.choice((0.0, 1.0, 1e38))
            payload = flat(model.layout, *(size * g for g in gradients(model, step)))
            key = chance.choice(sorted(defaults))
            options = {key: _hostile(chance, defaults[key])}
            if (error := _refusal(bad, payload, options)) is not None:
                assert isinstance(error, InvalidRequest | UnsupportedOptimizer), options
                bad = StubStream(shard, 1, 2)
            assert good.exchange(payload, groups=[options_to_pb({})])[0].outcome == pb.OUTCOME_APPLIED, (name, options)
        if checks == "ours":
            assert "failed" not in model.tracker.counts.outcomes
        with killed(shard, live) as again:
            _same(shard, model, again, again.place(model.layout.shard_map))
        good.end()
        bad.end()


def _refusal(stream: StubStream, payload: bytes, options: dict[str, Any]) -> PsError | None:
    """Push; the error that ended the stream, if one did."""
    try:
        stream.exchange(payload, groups=[options_to_pb(options)])
    except grpc.RpcError as refused:
        return error_of(refused)
    except InvalidRequest as unsent:  # numbers beyond 64 bits
        stream.end()
        return unsent
    return None


def _raise_on_magic(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a torch would that raises where nobody expects it: in the middle, with some of the state changed."""
    real = ShardOptimizer._step

    def step(self, scale):
        first = self._arenas[0].segments[0].parameter
        if first.grad is not None and float(first.grad.flatten()[0]) == MAGIC:
            first.add_(1.0)
            raise RuntimeError("unexpected")
        real(self, scale)

    monkeypatch.setattr(ShardOptimizer, "_step", step)
    monkeypatch.setattr(FusedStep, "of", lambda optimizer: None)


def test_a_shard_whose_model_stopped_in_the_middle_of_a_step_comes_back_without_it(tmp_path, killed, monkeypatch):
    """Also from a log that an older version has written."""
    _raise_on_magic(monkeypatch)
    with shard_on(tmp_path / "a") as shard:
        model, _ = start(shard, optimizer="torch.optim.Adam")
        stream = StubStream(shard)
        stream.exchange(flat(model.layout, *gradients(model, 1)))
        before, state = held(shard, model), _state(model)
        magic = flat(model.layout, *(torch.full_like(g, MAGIC) for g in gradients(model, 2)))
        stream.push(magic)
        with pytest.raises(grpc.RpcError):
            stream.result()
        with killed(shard) as again:
            other = again.place(model.layout.shard_map)
            assert torch.equal(held(again, other), before)
            assert _state(other) == state
            resumed = StubStream(again)
            assert resumed.opened.last_sequence == 2
            # From here on its steps can be undone.
            assert resumed.exchange(magic)[0].outcome == pb.OUTCOME_SKIPPED
            assert torch.equal(held(again, other), before)
            assert resumed.exchange(flat(model.layout, *gradients(model, 3)))[0].outcome == pb.OUTCOME_APPLIED
            resumed.end()


@pytest.mark.parametrize("step", [-1.0, float("nan"), 1e30])
def test_state_that_no_step_has_made_is_refused(step):
    with running_shard() as shard:
        model, _ = start(shard, (3,), optimizer="torch.optim.Adam")
        before = _state(model)
        fields = [("step", ()), ("exp_avg", (3,)), ("exp_avg_sq", (3,))]
        float32 = common_pb2.DTYPE_FLOAT32
        tensors = [pb.StateTensor(slice=0, name=name, dtype=float32, shape=shape) for name, shape in fields]
        payload = np.array([step, *[0.0] * 6], np.float32).tobytes()
        worker = pb.WorkerId(rank=0, incarnation=1)
        head = pb.LoadHeader(model=model.name, state=tensors, with_state=True, worker=worker)
        chunk = pb.Chunk(position=0, payload=payload)
        with pytest.raises(grpc.RpcError) as refused:
            shard_pb2_grpc.ShardStub(shard.channel).Load(
                iter([pb.LoadRequest(header=head), pb.LoadRequest(chunk=chunk)])
            )
        error = error_of(refused.value)
        assert isinstance(error, InvalidRequest)
        assert "'step' is out of range" in error.message
        assert error.variable == "v0"
        assert _state(model) == before


def test_state_that_an_older_version_has_taken_is_in_a_log_whose_steps_can_be_undone(tmp_path, killed):
    with shard_on(tmp_path / "a") as shard:
        model, _ = start(shard, (3,), optimizer="torch.optim.Adam")
        names = ("step", -1.0, ()), ("exp_avg", 0.0, (3,)), ("exp_avg_sq", 0.0, (3,))
        entries = [(StateKey(0, name), torch.full(shape, value)) for name, value, shape in names]

        async def load() -> None:
            def work() -> None:
                model._applier.replica.load(None, entries)
                shard.storage.log.append(Loaded(model.name, None, entries))

            await shard.registry.context.executor.submit(work, 1 << 62)

        shard.loop.run(load())
        stream = StubStream(shard)
        payload = flat(model.layout, *gradients(model, 1))
        for _ in range(3):  # torch divides by 1 - beta ** 0
            outcome = stream.exchange(payload)[0].outcome
            assert outcome in (pb.OUTCOME_SKIPPED, pb.OUTCOME_APPLIED)
        with killed(shard) as again:
            _same(shard, model, again, again.place(model.layout.shard_map))
        stream.end()


def test_a_model_that_cannot_be_made_is_refused_and_is_not_in_the_log(tmp_path, killed):
    """Arguments that no optimizer of its class takes: found by the fuzzer, declared under a name of its own."""
    with shard_on(tmp_path, {0: 1}) as shard:
        model, _ = start(shard)
        spec = replace(simple_spec((2, 2)), name="impossible", group_options=({"eps": 0},))
        written = shard.registry.context.log.number
        with pytest.raises(UnsupportedOptimizer, match="eps"):
            shard.place(whole_map(spec))
        assert shard.registry.context.log.number == written
        served = bytes(held(shard, model).numpy())
    with shard_on(tmp_path, {0: 1}) as shard:
        assert list(shard.storage.recovered) == ["model"]
        model = shard.place(shard.storage.recovered["model"].shard_map)
        assert bytes(held(shard, model).numpy()) == served
