"""What shards do with stale pushes is what the references of the laboratory do."""

from __future__ import annotations

import random

import pytest
import torch

from benchmarks.learning.__main__ import consistency_of
from benchmarks.learning.laboratory import Outcome, Setting, train
from benchmarks.learning.rules import RULES, Pushed
from benchmarks.learning.tasks import NoisyQuadratic
from ps_protocol.launch.rehearsal import speeds_of
from ps_protocol.model.spec import StaleRule
from ps_server.consistency.stale import factor_of

#: The rule of a shard, that of the laboratory, and how many more workers that one is given: it drops at its threshold,
#: a shard above it.
PAIRS = [
    ("accept", "plain", 0),
    ("scale:0", "inverse", 0),
    ("scale:1", "inverse", 0),
    ("scale:workers", "concurrency", 0),
    ("reject:workers", "threshold", 1),
]


@pytest.mark.parametrize(("shipped", "reference", "more"), PAIRS)
def test_each_rule_equals_its_reference_on_random_delays(shipped: str, reference: str, more: int) -> None:
    chance, factor, empty = random.Random(shipped), factor_of(StaleRule.parse(shipped)), torch.zeros(1)
    for _ in range(2000):
        workers, staleness = chance.randint(1, 64), int(chance.expovariate(1 / 30)) + 1
        expected = RULES[reference](workers + more, {"lr": 0.1}).take(Pushed(0, staleness, 1.0, empty, empty, empty))
        assert factor(staleness, workers) == expected


@pytest.mark.parametrize(("shipped", "reference"), [pair[:2] for pair in PAIRS if not pair[2]])
def test_a_training_with_a_rule_of_the_shards_is_that_with_its_reference(shipped: str, reference: str) -> None:
    def trained(mode: str, rule: str) -> Outcome:
        setting = Setting("SGD", {"lr": 0.02}, consistency_of(mode), 6, 120, rule=rule)
        return train(NoisyQuadratic(), setting, speeds_of("exponential", 6, 1), 1)

    assert trained(f"async+{shipped}", "plain") == trained("async", reference)
