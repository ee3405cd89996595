"""What a cluster must end with, bit for bit, without any process: an undisturbed worker, and a replay of the logs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch

from chaos.replay import replay
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import DType, ModelSpec, ShardMap, Slice, Variable
from ps_server.coordinator.placement.variables import Balanced, place
from ps_server.optimizers.state import StateKey
from ps_server.state.region import Region
from ps_server.state.replica import Replica, Step
from tests.recovery.cluster import Cluster, Worker
from tests.recovery.scripts import gradients_of, make_model


class Undisturbed:
    """One worker's training without any process: the optimizers of its shards, and nothing around them."""

    def __init__(self, shards: int = 1, optimizer: str = "Adam", ballast: int = 0) -> None:
        self._model = make_model(ballast)
        self._parameters = list(self._model.parameters())
        variables = tuple(Variable(f"v{i}", tuple(p.shape), DType.FLOAT32) for i, p in enumerate(self._parameters))
        self._spec = ModelSpec("reference", f"torch.optim.{optimizer}", variables, ({"lr": 0.01},))
        self._place(shards)

    def train(self, *steps: int) -> Undisturbed:
        for step in steps:
            gradients_of(self._model, 0, step)
            for replica, gradients in zip(self._replicas, self._gradients, strict=True):
                for index, span in enumerate(replica.layout.slices):
                    gradients.slice(index).copy_(_rows(self._parameters[span.slice.variable].grad, span.slice))
                replica.apply(Step(gradients, frozenset(), self._spec.group_options))
                for index, span in enumerate(replica.layout.slices):
                    _rows(self._parameters[span.slice.variable].data, span.slice).copy_(replica.region.slice(index))
        return self

    def move(self, shards: int) -> Undisturbed:
        """Go on on as many shards, with the same values and state."""
        state = self.state()
        self._place(shards)
        for replica in self._replicas:
            spans = list(enumerate(replica.layout.slices))
            entries = [
                (StateKey(index, name), _rows(tensor, span.slice).clone() if tensor.dim() else tensor.clone())
                for index, span in spans
                for (variable, name), tensor in state.items()
                if variable == span.slice.variable
            ]
            replica.load(None, entries)
        return self

    def state(self) -> dict[tuple[int, str], torch.Tensor]:
        """By number of variable and name the whole state of the optimizer; rows of one variable have equal counters."""
        whole: dict[tuple[int, str], torch.Tensor] = {}
        for replica in self._replicas:
            for key, tensor in replica.state():
                piece = replica.layout.slices[key.slice_index].slice
                like = self._parameters[piece.variable] if tensor.dim() else tensor
                found = whole.setdefault((piece.variable, key.name), torch.zeros_like(like))
                (_rows(found, piece) if tensor.dim() else found).copy_(tensor)
        return whole

    def _place(self, shards: int) -> None:
        shard_map = ShardMap(1, self._spec, shards, place(self._spec, shards, Balanced()))
        self._replicas = [Replica(Layout.of(shard_map, shard)) for shard in range(shards)]
        self._gradients = [Region(replica.layout) for replica in self._replicas]
        for replica in self._replicas:
            for index, span in enumerate(replica.layout.slices):
                replica.region.slice(index).copy_(_rows(self._parameters[span.slice.variable].detach(), span.slice))

    @property
    def digest(self) -> str:
        return _digest(self._parameters)


def alone(steps: int, optimizer: str = "Adam", ballast: int = 0) -> str:
    """The digest after ``steps`` steps of one worker on one shard."""
    return Undisturbed(1, optimizer, ballast).train(*range(steps)).digest


def replayed(data: Path, shards: int = 1) -> dict[str, str]:
    """By model the digest of what the data directories hold: their snapshots and every record of their logs."""
    return {name: _digest(model.tensors) for name, model in replay(data, shards).items()}


def _rows(tensor: torch.Tensor, piece: Slice) -> torch.Tensor:
    return tensor[piece.row_begin : piece.row_end]


def _digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


def counts_of(line: str, killed: Mapping[int, Worker] = MappingProxyType({})) -> torch.Tensor:
    """What a worker said as "ledger": how often each push was applied, by tag and step, the same on every shard.

    Only what was under way when one of ``killed``, by tag, died may have come to one of two shards alone.
    """
    first, second = _ledgers(line)
    apart = {(tag, step) for tag, step in (first != second).nonzero().tolist()}
    assert apart <= {(tag, worker.steps) for tag, worker in killed.items()}, f"on one shard only: (tag, step) {apart}"
    return first.maximum(second)


def _ledgers(line: str) -> torch.Tensor:
    return torch.tensor(json.loads(line.removeprefix("ledger ")))


def assert_each_push_was_applied_once(counts: torch.Tensor, workers: Sequence[Worker]) -> None:
    """Of the workers with tags 0, 1, …: every acknowledged push once; one that was under way once, or not at all."""
    for tag, worker in enumerate(workers):
        row, steps = counts[tag].tolist(), worker.steps
        assert row[:steps] == [1.0] * steps, f"worker of tag {tag}, acknowledged {steps}: {row}"
        assert row[steps] in (0.0, 1.0), f"worker of tag {tag}, acknowledged {steps}: {row}"
        assert not any(row[steps + 1 :]), f"worker of tag {tag}, acknowledged {steps}: {row}"


def assert_served_is_replayed(
    cluster: Cluster, worker: Worker, killed: Mapping[int, Worker] = MappingProxyType({})
) -> torch.Tensor:
    """``worker``, told to end, says what the shards serve: the bits of a replay of their logs. Returns its counts."""
    worker.tell()
    digest, ledger = worker.read("digest").split()[1], worker.read("ledger")
    assert worker.wait() == 0
    found = replayed(cluster.data, len(cluster.shards))
    assert found["model"] == digest
    assert found["ledger"] == _digest([*_ledgers(ledger)])
    return counts_of(ledger, killed)
