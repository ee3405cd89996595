"""Where a worker begins that comes to a training under way. Tests import transformers: 3 s, only where they run."""

from __future__ import annotations

import warnings

import pytest
import torch


@pytest.mark.parametrize(
    ("version", "first", "updates", "step"),
    [
        (0, {"version": 0, "step": 0}, 1, 0),
        (7, {"version": 0, "step": 0}, 1, 7),
        (7, {"version": 0, "step": 0}, 2, 3),
        # The model came from a checkpoint of the cluster, the trainer from one of its own.
        (107, {"version": 100, "step": 40}, 1, 47),
        # The job was restored from before the training began.
        (90, {"version": 100, "step": 40}, 1, 40),
    ],
)
def test_the_step_of_the_others_follows_from_the_versions(
    version: int, first: dict[str, int], updates: int, step: int
) -> None:
    from ps_worker.huggingface.trainer import running_step

    assert running_step(version, first, updates) == step


def test_a_scheduler_is_brought_to_a_step_without_a_warning() -> None:
    from ps_worker.huggingface.trainer import advance

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advance(scheduler, 4)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.6)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    advance(plateau, 4)
    assert plateau.last_epoch == 0
