"""What a cluster must end with, bit for bit, without any process: an undisturbed worker, and a replay of the logs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from chaos.replay import replay
from ps_protocol.layout import Layout
from ps_protocol.model import DType, ModelSpec, ShardMap, Slice, Variable
from ps_server.optimizers import Region, Replica, Step
from tests.recovery.cluster import Cluster, Worker
from tests.recovery.scripts import gradients_of, make_model


def alone(steps: int, optimizer: str = "Adam", ballast: int = 0) -> str:
    """The digest after ``steps`` steps of one worker on one shard: the shard's own optimizer, and nothing around it."""
    model = make_model(ballast)
    parameters = list(model.parameters())
    variables = tuple(Variable(f"v{i}", tuple(p.shape), DType.FLOAT32) for i, p in enumerate(parameters))
    spec = ModelSpec("reference", f"torch.optim.{optimizer}", variables, ({"lr": 0.01},))
    slices = tuple(Slice(i, 0, v.rows, 0) for i, v in enumerate(variables))
    layout = Layout.of(ShardMap(1, spec, 1, slices), 0)
    replica, gradients = Replica(layout), Region(layout)
    for index, parameter in enumerate(parameters):
        replica.region.slice(index).copy_(parameter.detach())
    for step in range(steps):
        gradients_of(model, 0, step)
        for index, parameter in enumerate(parameters):
            gradients.slice(index).copy_(parameter.grad)  # type: ignore[arg-type]
        replica.apply(Step(gradients, frozenset(), spec.group_options))
        with torch.no_grad():
            for index, parameter in enumerate(parameters):
                parameter.copy_(replica.region.slice(index))
    return _digest(parameters)


def replayed(data: Path, shards: int = 1) -> dict[str, str]:
    """By model the digest of what the data directories hold: their snapshots and every record of their logs."""
    return {name: _digest(model.tensors) for name, model in replay(data, shards).items()}


def _digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


def counts_of(line: str) -> torch.Tensor:
    """What a worker said as "ledger": how often each push was applied, by tag and step, the same on every shard."""
    first, second = torch.tensor(json.loads(line.removeprefix("ledger ")))
    assert torch.equal(first, second), "one shard has applied a push that the other has not"
    return first


def assert_each_push_was_applied_once(counts: torch.Tensor, workers: Sequence[Worker]) -> None:
    """Of the workers with tags 0, 1, …: every acknowledged push once; one that was under way once, or not at all."""
    for tag, worker in enumerate(workers):
        row, steps = counts[tag].tolist(), worker.steps
        assert row[:steps] == [1.0] * steps, f"worker of tag {tag}, acknowledged {steps}: {row}"
        assert row[steps] in (0.0, 1.0), f"worker of tag {tag}, acknowledged {steps}: {row}"
        assert not any(row[steps + 1 :]), f"worker of tag {tag}, acknowledged {steps}: {row}"


def assert_served_is_replayed(cluster: Cluster, worker: Worker) -> torch.Tensor:
    """``worker``, told to end, says what the shards serve: the bits of a replay of their logs. Returns its ledger."""
    worker.tell()
    digest, ledger = worker.read("digest").split()[1], worker.read("ledger")
    counts = counts_of(ledger)
    assert worker.wait() == 0
    found = replayed(cluster.data, len(cluster.shards))
    assert found["model"] == digest
    assert found["ledger"] == _digest([counts, counts])
    return counts
