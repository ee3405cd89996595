"""What the strategies of the trainer and of Fabric share: the connection of this process, and its exchanges."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.accelerators.cpu import CPUAccelerator
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.accelerators import CPUAccelerator as TrainerCpuAccelerator

from ps_protocol.errors import ConfigError, InvalidRequest
from ps_protocol.text import whole_number
from ps_worker.cluster import Cluster
from ps_worker.connection import connected, note_failure
from ps_worker.data.files.batches import FileBatches
from ps_worker.data.files.layout import LEAST_ROWS


class TrainerProcess:
    """The part of a strategy that knows the job; a base before Lightning's class. Until ``join_job`` it is the only
    worker.
    """

    accelerator: Any

    def __init__(self, cluster: Cluster | None, name: str, section: Callable[[], int]) -> None:
        """``name`` and ``section``: see TrainerExchanges. ``cluster``: None for the connection of this process."""
        self._given = cluster
        self._name = name
        self._section = section
        self._cluster: Cluster | None = None
        self._exchanges: TrainerExchanges | None = None
        _guess_rank()

    def join_job(self) -> None:
        """Join the job, once per process. Raises PsError."""
        self._cluster = join_once(self._cluster or self._given)
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
        """Device of this worker; the CPU where the script chose that accelerator, and before it has joined."""
        if self._cluster is None or isinstance(self.accelerator, CPUAccelerator | TrainerCpuAccelerator):
            return torch.device("cpu")
        return self._cluster.device

    @property
    def global_rank(self) -> int:
        """Number of this worker."""
        return self._cluster.rank if self._cluster else 0

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self._cluster.world_size if self._cluster else 1

    @property
    def local_rank(self) -> int:
        """LOCAL_RANK where it is set, else the number of this worker: worker 0 prepares data."""
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
        """Wait until every live worker has called this."""
        if self._exchanges is not None:
            self._exchanges.gather(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of worker ``src``: what JSON has, a path, or a tensor."""
        return obj if self._exchanges is None else self._exchanges.broadcast(obj, src)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of all workers, stacked by rank."""
        return tensor if self._exchanges is None else self._exchanges.all_gather(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all workers, or at least one of them, decided so."""
        return decision if self._exchanges is None else self._exchanges.decide(decision, all)

    def reduced(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        """Reduce a tensor, 64 KiB at most, over the workers."""
        return tensor if self._exchanges is None else self._exchanges.reduce(tensor, group, reduce_op)


def split_loader(cluster: Cluster, loader: Any) -> Any:
    """Return this worker's part of ``loader``. Raises ConfigError for data that cannot be split, for leased rows of
    files, and for files of which a worker would get nothing.

    Rows of files are split by rank: Lightning asks for a batch before the one before it is trained, which a lease would
    take for trained.
    """
    if not isinstance(loader, FileBatches):
        return cluster.shard(loader)
    if loader.leased:
        raise ConfigError(
            "a Lightning trainer cannot train leased rows: it asks for a batch before it has trained the one before",
            expected="files.read(…), which is split by rank",
            actual="the leased rows of cluster.files(…)",
            remedy="give the trainer files.read(…), or cluster.files(…, lease=False)",
        )
    parts = loader.data.layout.length // loader.data.layout.unit
    if parts < cluster.world_size:
        # Lightning's collective calls need a batch of every worker.
        raise ConfigError(
            "the files have too few rows for all workers",
            expected=f"{cluster.world_size} parts, each of {LEAST_ROWS} rows or a file of text",
            actual=f"{parts}",
            remedy="read so few rows into a Dataset, and give the trainer a DataLoader",
        )
    return UncountedBatches(loader if loader.split else cluster.shard(loader, lease=False))


class UncountedBatches(Iterable[Any]):
    """Batches without a length: that of files is an estimate, at which Lightning would end the epoch."""

    def __init__(self, batches: FileBatches) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "min": "min", "max": "max"}


class TrainerExchanges:
    """Collective calls of one strategy: reductions, decisions, paths, barriers.

    ``name`` is the same on all workers; calls are counted by ``section``, such as an epoch. A worker that was started
    again with a checkpoint goes on in the section of that checkpoint.
    """

    def __init__(self, cluster: Cluster, name: str, section: Callable[[], int]) -> None:
        self._cluster = cluster
        self._name = name
        self._section = section

    def gather(self, value: Any) -> dict[int, Any]:
        """Return the values of the workers that take part, by rank; ``None`` makes it a barrier. Raises PsError."""
        return self._cluster.gather_values(value, name=self._name, section=self._section())

    def reduce(self, value: Any, group: object, reduce_op: object) -> Any:
        """Reduce a tensor over the workers; anything else is returned as it is, as by Lightning's DDP.

        Raises ConfigError for an unknown reduction or a group, InvalidRequest for tensors that differ.
        """
        if not isinstance(value, torch.Tensor):
            return value
        name = "mean" if reduce_op is None else str(reduce_op).rpartition(".")[2].lower()
        if (reduction := _REDUCTIONS.get(name)) is None or group is not None:
            raise ConfigError(
                "the strategy torch_ps cannot make this reduction",
                expected=f"one of {', '.join(_REDUCTIONS)}, and no group",
                actual=f"{reduce_op}, group {group}",
            )
        exact = value.double() if reduction == "mean" and not value.is_floating_point() else value
        reduced = self._cluster.all_reduce(exact, reduction, name=self._name, section=self._section())
        return reduced.to(value.dtype)

    def all_gather(self, tensor: torch.Tensor, group: object, sync_grads: bool) -> torch.Tensor:
        """Return the tensors of the workers that take part, stacked by rank. Raises ConfigError, InvalidRequest."""
        if sync_grads or group is not None:
            raise ConfigError(
                "the strategy torch_ps cannot gather with gradients, or in a group",
                expected="sync_grads=False and no group",
                actual=f"sync_grads={sync_grads}, group {group}",
                remedy="compute the loss from this worker's own tensors",
            )
        return self._stacked(tensor)

    def broadcast(self, value: Any, source: int) -> Any:
        """Return the value of worker ``source``, or of the lowest rank where that takes no part. Raises PsError."""
        sent = {"path": str(value)} if isinstance(value, Path) else {"value": value}
        if isinstance(value, torch.Tensor):
            sent = value  # type: ignore[assignment]
        values = self.gather(sent)
        found = values.get(source, next(iter(values.values())))
        if isinstance(found, torch.Tensor):
            return found.to(value.device) if isinstance(value, torch.Tensor) else found
        return Path(found["path"]) if "path" in found else found["value"]

    def decide(self, decision: bool, every: bool) -> bool:
        """Return whether all workers, or at least one of them, decided so. Raises PsError."""
        return (all if every else any)(self.gather(bool(decision)).values())

    def _stacked(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = self.gather(tensor)
        for rank, part in parts.items():
            if not isinstance(part, torch.Tensor) or (part.shape, part.dtype) != (tensor.shape, tensor.dtype):
                raise InvalidRequest(
                    "workers exchange tensors that differ",
                    expected=f"{tuple(tensor.shape)} of {tensor.dtype}, as this worker's",
                    actual=f"{part!r:.80} from worker {rank}",
                    remedy="log the same values on every worker, with on_epoch where workers may have more batches",
                )
        return torch.stack(list(parts.values())).to(tensor.device)


_RANK_VARIABLE = "PS_RANK"


def _guess_rank() -> None:
    """Set the rank of Lightning's ``rank_zero_only`` from the environment, before the process has joined."""
    rank = whole_number(os.environ.get(_RANK_VARIABLE, ""))
    if rank is not None:
        _set_rank(rank)


def _set_rank(rank: int) -> None:
    vars(rank_zero_only)["rank"] = rank


def join_once(given: Cluster | None) -> Cluster:
    """Return ``given``, else the connection of this process.

    Raises ConfigError for an evaluator, and what ``connect`` raises.
    """
    note_failure(None)
    cluster = given or connected()
    if cluster.role != "worker":
        raise ConfigError(
            "an evaluator cannot run a trainer",
            expected="worker",
            actual=cluster.role,
            remedy="run evaluators with cluster.follow(model), and a trainer with PS_ROLE=worker",
        )
    _set_rank(cluster.rank)
    return cluster
