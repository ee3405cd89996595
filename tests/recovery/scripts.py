"""Training scripts of the workers, and the same training in one process without any server."""

from __future__ import annotations

import hashlib

import torch

STEPS = 40

TRAIN = """
import hashlib, sys
import torch
import ps_worker
from tests.recovery.scripts import gradients_of, make_model

steps, optimizer, transport, name = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
pauses = {int(text) for text in sys.argv[5:]}
with ps_worker.connect(transport=transport, device="cpu", reconnect_timeout_seconds=60) as cluster:
    model = make_model()
    made = cluster.optimizer(getattr(torch.optim, optimizer), model, lr=0.01, name=name)
    print("started", made.version, flush=True)
    for step in range(made.version, steps):
        gradients_of(model, cluster.rank, step)
        made.step()
        print("step", step + 1, flush=True)
        if step + 1 in pauses:
            sys.stdin.readline()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print("digest", digest, flush=True)
"""


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))


def gradients_of(model: torch.nn.Module, rank: int, step: int) -> None:
    """Gradients that depend on the parameters, so that a lost or doubled update shows ever after."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) + 0.1 * parameter.detach()


def alone(steps: int, optimizer: str) -> str:
    """The digest one undisturbed worker ends with, trained by plain torch on arenas as the shards use."""
    from tests.recovery.reference import train

    return hashlib.sha256(train(steps, optimizer)).hexdigest()
