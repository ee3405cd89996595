"""What a trainer tells the trainers of other workers: reductions, decisions, paths, and nothing at barriers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ps_protocol.errors import ConfigError, InvalidRequest
from ps_worker.cluster import Cluster

_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "min": "min", "max": "max"}


class TrainerExchanges:
    """One per strategy. ``name`` is the same on all workers; calls are counted by ``section``, such as epochs.

    A worker that was started again with a checkpoint goes on in the section of that checkpoint.
    """

    def __init__(self, cluster: Cluster, name: str, section: Callable[[], int]) -> None:
        self._cluster = cluster
        self._name = name
        self._section = section

    def gather(self, value: Any) -> dict[int, Any]:
        """The values of all workers that take part, by rank; ``None`` makes it a barrier. Raises PsError."""
        return self._cluster.gather_values(value, name=self._name, section=self._section())

    def reduce(self, value: Any, group: object, reduce_op: object) -> Any:
        """The reduction of a tensor over the workers; anything else is returned as it is, as in Lightning's DDP.

        Raises ConfigError for an unknown reduction or a group, InvalidRequest for tensors that differ.
        """
        if not isinstance(value, torch.Tensor):
            return value
        name = "mean" if reduce_op is None else str(reduce_op).rpartition(".")[2].lower()
        if name not in _REDUCTIONS or group is not None:
            raise ConfigError(
                "the strategy torch_ps cannot make this reduction",
                expected=f"one of {', '.join(_REDUCTIONS)}, and no group",
                actual=f"{reduce_op}, group {group}",
            )
        stacked = self._stacked(value)
        match _REDUCTIONS[name]:
            case "sum":
                return stacked.sum(0, dtype=value.dtype)
            case "min":
                return stacked.amin(0)
            case "max":
                return stacked.amax(0)
            case _:
                exact = stacked if value.is_floating_point() else stacked.double()
                return exact.mean(0).to(value.dtype)

    def all_gather(self, tensor: torch.Tensor, group: object, sync_grads: bool) -> torch.Tensor:
        """The tensors of all workers that take part, stacked by rank. Raises ConfigError, InvalidRequest."""
        if sync_grads or group is not None:
            raise ConfigError(
                "the strategy torch_ps cannot gather with gradients, or in a group",
                expected="sync_grads=False and no group",
                actual=f"sync_grads={sync_grads}, group {group}",
                remedy="compute the loss from this worker's own tensors",
            )
        return self._stacked(tensor)

    def broadcast(self, value: Any, source: int) -> Any:
        """The value of worker ``source``; where it does not take part, that of the lowest rank. Raises PsError."""
        sent = {"path": str(value)} if isinstance(value, Path) else {"value": value}
        if isinstance(value, torch.Tensor):
            sent = value  # type: ignore[assignment]
        values = self.gather(sent)
        told = values.get(source, next(iter(values.values())))
        if isinstance(told, torch.Tensor):
            return told.to(value.device) if isinstance(value, torch.Tensor) else told
        return Path(told["path"]) if "path" in told else told["value"]

    def decide(self, decision: bool, every: bool) -> bool:
        """Whether all workers, or at least one of them, decided so. Raises PsError."""
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
