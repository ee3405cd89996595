"""``python -m benchmarks.learning.divergence``: when a job would report that its model diverges, and when in vain.

Trainings of the laboratory, with a heartbeat after every few pushes that reports what a shard and the workers report:
the geometric mean of the gradients' norms, and each worker's last loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.learning.laboratory import Setting, train
from benchmarks.learning.tasks import TASKS, Task
from ps_protocol.cluster.view import Member, MemberStats, Role, UpdateCounts
from ps_protocol.launch.rehearsal import speeds_of
from ps_protocol.model.spec import Consistency, Mode
from ps_server.coordinator.divergence import DivergenceWatch

_SHARD = Member(Role.SHARD, 0, 1)


@dataclass(slots=True)
class Push:
    """What a push shows of the training."""

    rank: int
    loss: float
    norm: float = math.nan


class Recorded(Task):
    """A task that keeps the loss and the norm of the gradients of each push."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.pushes: list[Push] = []

    def model(self, seed: int) -> nn.Module:
        """That of the task."""
        model = self._task.model(seed)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._add)
        return model

    def loss(self, model: nn.Module, rank: int, workers: int, generator: torch.Generator) -> Tensor:
        """That of the task."""
        loss = self._task.loss(model, rank, workers, generator)
        self.pushes.append(Push(rank, float(loss.detach())))
        return loss

    def measure(self, model: nn.Module) -> float:
        """That of the task."""
        return self._task.measure(model)

    def _add(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            push = self.pushes[-1]
            norm = float(torch.linalg.vector_norm(parameter.grad))
            push.norm = norm if math.isnan(push.norm) else math.hypot(push.norm, norm)

    @property
    def finite(self) -> list[Push]:
        """The pushes before the first one that is not finite, which shards refuse."""
        for number, push in enumerate(self.pushes):
            if not math.isfinite(push.norm):
                return self.pushes[:number]
        return self.pushes


def warned_at(pushes: Sequence[Push], beat: int) -> tuple[int | None, int | None]:
    """After how many pushes the norm has grown, and a loss; None: never. A heartbeat comes after ``beat`` pushes."""
    watch, found = DivergenceWatch(Mode.ASYNC), dict[Role, int]()
    for end in range(beat, len(pushes) + 1, beat):
        for member, stats in _heartbeats(pushes[end - beat : end], end):
            watch.take(member, stats, {}, float(end))
            if member.role not in found and any(each.member.role is member.role for each in watch.divergences(end)):
                found[member.role] = end
    return found.get(Role.SHARD), found.get(Role.WORKER)


def _heartbeats(pushes: Sequence[Push], steps: int) -> Iterable[tuple[Member, MemberStats]]:
    norms = [math.log(push.norm) for push in pushes if push.norm > 0]
    norm = math.exp(sum(norms) / len(norms)) if norms else 0.0
    yield _SHARD, MemberStats(updates=(UpdateCounts("model", norm, 0.0, 0.0),))
    for rank, loss in {push.rank: push.loss for push in pushes}.items():
        yield Member(Role.WORKER, rank, 1), MemberStats(steps=steps, metrics={"loss": loss})


OPTIMIZERS: Sequence[tuple[str, dict[str, Any]]] = (
    *(("SGD", {"lr": rate, "momentum": 0.9}) for rate in (0.01, 0.05, 0.1, 0.3)),
    *(("SGD", {"lr": rate}) for rate in (0.05, 0.3)),
    *(("Adam", {"lr": rate}) for rate in (0.003, 0.01)),
    ("Adagrad", {"lr": 0.01}),
)

BEGINNINGS = (0.0, 0.25, 0.5)
"""A watch begins with the training, and after these parts of it, as where it is restored."""


@dataclass(slots=True)
class Counts:
    """Trainings of one kind, and after how many pushes each was warned of, of how many."""

    made: int = 0
    warned: list[str] = field(default_factory=list)


@click.command()
@click.option("--task", "tasks", type=click.Choice(list(TASKS)), multiple=True, default=["characters", "digits"])
@click.option("--workers", "counts", type=click.IntRange(1), multiple=True, default=[4, 8])
@click.option("--pushes", type=click.IntRange(1), default=800, show_default=True)
@click.option("--seeds", type=click.IntRange(1), default=2, show_default=True)
@click.option(
    "--beat", "beats", type=click.IntRange(1), multiple=True, default=[1, 4, 8, 16], help="Pushes a heartbeat."
)
def main(tasks: Sequence[str], counts: Sequence[int], pushes: int, seeds: int, beats: Sequence[int]) -> None:
    """Train with optimizers that learn and with ones that diverge, and count warnings."""
    torch.set_num_threads(1)
    recorded: list[tuple[str, str, list[Push]]] = []
    console = Console(width=160)
    for task in tasks:
        for workers in counts:
            for optimizer, options in OPTIMIZERS:
                for seed in range(seeds):
                    kept = Recorded(TASKS[task]())
                    # Measured at the end alone: the laboratory gives up early what diverges.
                    setting = Setting(optimizer, options, Consistency(), workers, pushes, measures=1)
                    outcome = train(kept, setting, speeds_of("exponential", workers, seed), seed)
                    kind = "learns" if not outcome.diverged else "explodes" if _exploded(kept) else "collapses"
                    recorded.append((task, kind, kept.finite))
                    console.print(task, workers, optimizer, options, seed, kind, len(kept.finite))
    table = Table("task", "pushes per heartbeat", "trainings", "warned by the norm, of", "by a loss")
    for task in tasks:
        for beat in beats:
            for kind in ("learns", "collapses", "explodes"):
                table.add_row(
                    task, str(beat), kind, *_row([r for t, k, r in recorded if (t, k) == (task, kind)], kind, beat)
                )
    console.print(table)


def _exploded(kept: Recorded) -> bool:
    """A norm became a thousand times what it was, or was not finite."""
    norms = [push.norm for push in kept.pushes]
    return len(kept.finite) < len(norms) or max(norms) > 1000 * max(norms[:8])


def _row(recorded: Sequence[list[Push]], kind: str, beat: int) -> tuple[str, str]:
    if kind != "learns":
        found = [(*warned_at(pushes, beat), len(pushes)) for pushes in recorded]
        norms = ", ".join(f"{norm or '–'}/{length}" for norm, _, length in found)
        return f"{sum(norm is not None for norm, _, _ in found)} of {len(found)}: {norms}", str(
            sum(loss is not None for _, loss, _ in found)
        )
    begun = [pushes[round(part * len(pushes)) :] for pushes in recorded for part in BEGINNINGS]
    found = [warned_at(pushes, beat) for pushes in begun]
    norms, losses = sum(norm is not None for norm, _ in found), sum(loss is not None for _, loss in found)
    return f"{norms} of {len(found)}", str(losses)


if __name__ == "__main__":
    main()
