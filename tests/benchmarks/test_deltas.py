"""What the program on deltas makes of a small model. No figure decides."""

from __future__ import annotations

import torch

from benchmarks import deltas
from benchmarks.deltas import LanguageModel, Size, Text


def test_each_step_of_a_small_model_has_a_delta_in_both_formats() -> None:
    size = Size(width=16, layers=1, heads=2, context=16, batch=2)
    torch.manual_seed(0)
    steps = deltas.steps_of(LanguageModel(size), Text(size), 2)
    assert [step.number for step in steps] == [1, 2]
    for step in steps:
        assert 0 < step.changed <= step.elements < 1
        assert 0 < step.delta < step.directory < 1


def test_a_delta_is_applied_beside_a_copy() -> None:
    found = deltas.applied(0.01, size=1_000_000, rounds=2)
    assert 0 < found.size < 100_000
    assert min(found.encode, found.copy, found.decompress, found.apply) > 0
