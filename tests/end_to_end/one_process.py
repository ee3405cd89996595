"""A network with a table, trained by several workers on batches of different sizes, and by one process on all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ps_protocol.model.spec import Consistency, Mode
from ps_worker import Cluster, rows
from tests.end_to_end.training import run_workers
from tests.worker.jobs import running_job

ROWS, DIM = 12, 4
ROW_RATE = 0.1

Batch = tuple[Tensor, Tensor, Tensor]
"""Ids [n, 2], features [n, 3], targets [n]."""


class Network(nn.Module):
    """Two ids of each sample, and features, below two dense layers; ``embed`` gives rows [n, 2, DIM]."""

    def __init__(self, embed: nn.Module | None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.embed = embed
        self.body = nn.Linear(3 + (2 * DIM if embed is not None else 0), 6)
        self.head = nn.Linear(6, 1)
        with torch.no_grad():
            for parameter in [*self.body.parameters(), *self.head.parameters()]:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        if self.embed is not None:
            features = torch.cat([features, self.embed(ids).flatten(1)], 1)
        result: Tensor = self.head(torch.tanh(self.body(features))).squeeze(1)
        return result


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over the batch."""
    return nn.functional.mse_loss(model(batch[0], batch[1]), batch[2])


def steps_of(sizes: Sequence[Sequence[int]], seed: int = 3) -> list[list[Batch]]:
    """Per step, a batch of each of these sizes; targets are large, so that gradients are."""
    generator = torch.Generator().manual_seed(seed)

    def batch(size: int) -> Batch:
        ids = torch.randint(ROWS, (size, 2), generator=generator)
        return ids, torch.randn(size, 3, generator=generator), 5 * torch.randn(size, generator=generator)

    return [[batch(size) for size in step] for step in sizes]


def joined(step: Sequence[Batch]) -> Batch:
    ids, features, targets = (torch.cat([batch[i] for batch in step]) for i in range(3))
    return ids, features, targets


def alone(
    steps: Sequence[Batch],
    torch_class: type[torch.optim.Optimizer],
    *,
    tables: bool,
    clip: float | None = None,
    **arguments: float,
) -> list[Tensor]:
    """Plain torch on ``steps``: dense parameters, then the embedding, whose rows have plain SGD."""
    embed = nn.Embedding(ROWS, DIM) if tables else None
    if embed is not None:
        nn.init.constant_(embed.weight, 0.2)
    model = Network(embed)
    dense = [*model.body.parameters(), *model.head.parameters()]
    optimizers: list[torch.optim.Optimizer] = [torch_class(dense, **arguments)]
    if embed is not None:
        optimizers.append(torch.optim.SGD([embed.weight], lr=ROW_RATE))
    for batch in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
    return _values(model, embed.weight.detach() if embed is not None else None)


def together(
    steps: Sequence[Sequence[Batch]],
    torch_class: type[torch.optim.Optimizer],
    *,
    tables: bool,
    mode: Mode = Mode.SYNC,
    shards: int = 2,
    weigh: Callable[[Batch], float | None] = lambda batch: None,
    settings: dict[str, object] | None = None,
    **arguments: float,
) -> list[list[Tensor]]:
    """The same from each worker of a cluster: worker ``rank`` has batch ``rank`` of each step."""
    workers = len(steps[0])

    def work(cluster: Cluster) -> list[Tensor]:
        table = (
            cluster.embedding(DIM, name="words", init=rows.Constant(0.2), optimizer=rows.SGD(lr=ROW_RATE))
            if tables
            else None
        )
        model = Network(table)
        optimizer = cluster.optimizer(torch_class, model, **(settings or {}), **arguments)
        for step in steps:
            optimizer.zero_grad()
            batch = step[cluster.rank]
            loss_of(model, batch).backward()
            optimizer.step(weight=weigh(batch))
        cluster.barrier()
        with torch.no_grad():
            return _values(model, table(torch.arange(ROWS)) if table is not None else None)

    with running_job(shards, workers, consistency=Consistency(mode)) as job:
        return run_workers(job, workers, work)


def _values(model: Network, embedded: Tensor | None) -> list[Tensor]:
    dense = [p.detach().clone() for p in [*model.body.parameters(), *model.head.parameters()]]
    return dense if embedded is None else [*dense, embedded.detach().clone()]
