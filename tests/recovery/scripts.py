"""What the worker processes train: a model whose bits tell its whole history, and a ledger that counts each push."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

STEPS = 24

TAGS, ENTRIES = 16, 64
"""The ledger counts the pushes of this many worker processes, and of each this many."""


@dataclass(frozen=True)
class Work:
    """What one worker process does, and what it says: ``step N`` when step N has been answered."""

    #: It trains until its model is of this version (alone), or makes this many steps (``tag`` given).
    steps: int = STEPS
    optimizer: str = "Adam"
    transport: str = "auto"
    #: Steps after which it waits for a line.
    pauses: Sequence[int] = ()
    #: This process' row in the ledger; -1: it keeps none, and begins where the model is.
    tag: int = -1
    #: After this step it ends as a crash does.
    dies_after: int = 0
    #: At the end it waits for a line, then says what the shards hold.
    stays: bool = False
    #: Elements of one more parameter.
    ballast: int = 0
    #: It trains tables, with so many new ids in each step, and nothing else.
    rows: int = 0
    #: The ledger has rows of a table, too: one for each push, and one of every push.
    row_ledger: bool = False
    #: Of its gradients in the mean; 0: 1.
    weight: float = 0.0
    #: Gradients are clipped to this norm; 0: they are not.
    clip: float = 0.0


class Ledger(torch.nn.Module):
    """Counts how often each push was applied, exactly: two variables, so that each of two shards holds one."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = torch.nn.ParameterList(torch.zeros(TAGS, ENTRIES) for _ in range(2))

    def mark(self, tag: int, step: int) -> None:
        """The gradients of push ``step``: with SGD and a learning rate of 1 they add 1 to its entry."""
        for parameter in self.counts:
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad[tag, step] = -1.0


def make_model(ballast: int = 0) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    if ballast:
        model.register_parameter("ballast", torch.nn.Parameter(torch.zeros(ballast)))
    return model


def gradients_of(model: torch.nn.Module, rank: int, step: int) -> None:
    """Gradients that depend on the parameters, so that a lost or doubled update shows ever after."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) + 0.1 * parameter.detach()


def digest_of(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def main(arguments: Sequence[str]) -> None:
    told = Work(**json.loads(arguments[0]))
    if told.rows:
        from tests.recovery import row_scripts

        row_scripts.work(told)
    else:
        work(told)


def work(told: Work) -> None:
    """A worker process."""
    import ps_worker

    with ps_worker.connect(transport=told.transport, device="cpu", reconnect_timeout_seconds=60) as cluster:
        model, ledger = make_model(told.ballast), Ledger()
        chosen = optimizer_class(told.optimizer)
        made = [cluster.optimizer(chosen, model, lr=0.01, name="model", clip_grad_norm=told.clip or None)]
        table = None
        if told.row_ledger:
            from ps_worker import rows

            table = cluster.embedding(1, name="rows", optimizer=rows.SGD(lr=1.0), init=rows.Constant(0.0))
        if told.tag >= 0:
            whole = ledger if table is None else torch.nn.ModuleList([ledger, table])
            made.append(cluster.optimizer(torch.optim.SGD, whole, lr=1.0, name="ledger"))
        say("started", made[0].version)
        for step in range(0 if told.tag >= 0 else made[0].version, told.steps):
            gradients_of(model, cluster.rank, step)
            if told.tag >= 0:
                ledger.mark(told.tag, step)
            if table is not None:
                (-table(torch.tensor([told.tag * ENTRIES + step, -1])).sum()).backward()
            for optimizer in made:
                optimizer.step(weight=told.weight or None)
            say("step", step + 1)
            if step + 1 == told.dies_after:
                os._exit(7)
            if step + 1 in told.pauses:
                sys.stdin.readline()
        if told.stays:
            say("stays")
            sys.stdin.readline()
            for optimizer in made:
                optimizer.pull()
        say("digest", digest_of(model))
        counted = list(ledger.counts)
        if table is not None:
            with torch.no_grad():
                counted.append(table(torch.arange(TAGS * ENTRIES)).reshape(TAGS, ENTRIES))
        say("ledger", json.dumps([counts.detach().tolist() for counts in counted]))


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Of torch, or of the users' ones, which this process imports now: servers know them if they are told."""
    if hasattr(torch.optim, name):
        return getattr(torch.optim, name)
    return getattr(importlib.import_module("tests.support.user_optimizers"), name)


def say(*words: object) -> None:
    print(*words, flush=True)
