"""The judge sees what goes wrong with rules for stale pushes, and with the point at which a mode begins."""

from __future__ import annotations

from dataclasses import replace

from ps_protocol.model.spec import Consistency
from ps_server.coordinator.jobs.mode_runner import ModeRunner
from ps_server.log import messages
from ps_server.shard.step.model import ShardModel
from simulation.plan import Fault, Size
from tests.simulation.runs import every_second, shown

SEEDS = range(40)
CALM = {"durable": True, "overlap": False, "calls_lost": 0.0, "calls_late": 0.0, "think_seconds": 0.1}


def test_a_replay_that_forgets_the_factor_of_a_stale_push_is_seen(monkeypatch):
    decode = messages.decode_update

    def whole(*arguments):
        update = decode(*arguments)
        return replace(update, step=replace(update.step, scale=1.0))

    monkeypatch.setattr(messages, "decode_update", whole)
    fixed = {"consistency": Consistency.of("async", stale_policy="scale", stale_threshold=0)}
    assert shown("restored version", SEEDS, faults=every_second("shard_crash"), **fixed, **CALM)


def test_a_model_whose_own_rule_is_forgotten_when_the_mode_changes_is_seen(monkeypatch):
    def forgetful(self, consistency):
        self.tracker.configure(consistency)
        self._advance()

    monkeypatch.setattr(ShardModel, "configure", forgetful)
    fixed = {"consistency": Consistency.of("async"), "stale": "reject:1", "faults": every_second("mode")}
    assert shown("updates old", SEEDS, **fixed, **CALM)


def test_a_threshold_that_does_not_follow_the_live_workers_is_seen(monkeypatch):
    monkeypatch.setattr("ps_server.consistency.stale._Policy.threshold", lambda self, workers: 2)
    fixed = {"consistency": Consistency.of("async", stale_policy="scale"), "faults": every_second("worker_crash")}
    assert shown("updates old", SEEDS, **fixed, **CALM)


def test_a_mode_that_begins_on_one_shard_after_another_is_seen(monkeypatch):
    async def at_once(self, consistency):
        return self._driver.set_consistency(consistency)

    monkeypatch.setattr(ModeRunner, "_make", at_once)
    faults = tuple(Fault(2.0 + 0.4 * number, "mode") for number in range(20))
    assert shown("another shard by", SEEDS, Size(steps=30), faults=faults, delay_seconds=0.05, **CALM)
