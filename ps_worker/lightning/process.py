"""What the strategies of the trainer and of Fabric have in common: this process among the workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.accelerators.cpu import CPUAccelerator
from lightning.pytorch.accelerators import CPUAccelerator as TrainerCpuAccelerator

from ps_protocol.errors import ConfigError
from ps_worker.cluster import Cluster
from ps_worker.lightning import joined
from ps_worker.lightning.exchanges import TrainerExchanges


class TrainerProcess:
    """Part of a strategy, before the class of Lightning among its bases. Before ``join_job`` it is alone."""

    accelerator: Any

    def __init__(self, cluster: Cluster | None, name: str, section: Callable[[], int]) -> None:
        """``name`` and ``section``: see TrainerExchanges. ``cluster``: None for the connection of this process."""
        self._given = cluster
        self._name = name
        self._section = section
        self._cluster: Cluster | None = None
        self._exchanges: TrainerExchanges | None = None
        joined.guess_rank()

    def join_job(self) -> None:
        """Join the job, once per process. Raises PsError."""
        self._cluster = joined.join(self._cluster or self._given)
        if self._exchanges is None:
            self._exchanges = TrainerExchanges(self._cluster, self._name, self._section)

    @property
    def cluster(self) -> Cluster:
        """The connection. Raises ConfigError before the process has joined."""
        if self._cluster is None:
            raise ConfigError(
                "the strategy torch_ps has not joined the job",
                expected="a trainer that has begun, or fabric.launch()",
                remedy="call fabric.launch() before setup() and before collective calls",
            )
        return self._cluster

    @property
    def root_device(self) -> torch.device:
        """The cluster's device for this worker; the CPU where Lightning is told so, and before it has joined."""
        if self._cluster is None or isinstance(self.accelerator, CPUAccelerator | TrainerCpuAccelerator):
            return torch.device("cpu")
        return self._cluster.device

    @property
    def global_rank(self) -> int:
        """The number of this worker."""
        return self._cluster.rank if self._cluster else 0

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self._cluster.world_size if self._cluster else 1

    @property
    def local_rank(self) -> int:
        """LOCAL_RANK where it is set, else the number of this worker: data is prepared by worker 0."""
        return int(os.environ.get("LOCAL_RANK", self.global_rank))

    @property
    def node_rank(self) -> int:
        """NODE_RANK where it is set, else 0."""
        return int(os.environ.get("NODE_RANK", 0))

    @property
    def is_global_zero(self) -> bool:
        """Whether this is worker 0, which writes checkpoints and logs."""
        return self.global_rank == 0

    def barrier(self, name: str | None = None) -> None:
        """Wait until every live worker is here."""
        if self._exchanges is not None:
            self._exchanges.gather(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of worker ``src``: what JSON has, a path, or a tensor."""
        return obj if self._exchanges is None else self._exchanges.broadcast(obj, src)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all workers, stacked by rank."""
        return tensor if self._exchanges is None else self._exchanges.all_gather(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all workers, or at least one of them, decided so."""
        return decision if self._exchanges is None else self._exchanges.decide(decision, all)

    def reduced(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        """The reduction of a tensor of at most 64 KiB over the workers."""
        return tensor if self._exchanges is None else self._exchanges.reduce(tensor, group, reduce_op)
