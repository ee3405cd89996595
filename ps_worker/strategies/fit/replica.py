"""What the loop asks of the strategy that it runs under."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

T = TypeVar("T")


class LoopReplica(Protocol):
    """A strategy, as this process sees it; see ``ps_worker.Strategy``."""

    @property
    def device(self) -> torch.device:
        """The device of this replica."""

    @property
    def rank(self) -> int:
        """Number of this replica, from 0."""

    @property
    def replicas(self) -> int:
        """The number of processes that train."""

    @property
    def is_chief(self) -> bool:
        """Whether this replica writes files."""

    def place(self, value: T) -> T:
        """``value`` on the device."""

    def accumulate(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A context for backward passes without an exchange."""

    def reduce(self, how: str, value: T) -> T:
        """The mean or sum over the replicas."""

    def epoch(self, number: int) -> AbstractContextManager[Any]:
        """A context for everything in an epoch."""

    def continue_data(self, loader: Any, optimizer: torch.optim.Optimizer, epoch: int) -> None:
        """Have the loader begin with ``epoch``."""

    def refresh(self, model: nn.Module) -> None:
        """Bring the newest values into ``model``."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module inside."""

    def barrier(self) -> None:
        """Wait for all replicas."""

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        values: dict[str, Any],
        state: dict[str, Any],
        epoch: int,
    ) -> None:
        """Put saved values and state back."""
