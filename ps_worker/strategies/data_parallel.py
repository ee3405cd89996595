"""The strategies that keep a copy of the model on every replica: mirrored and multi_worker_mirrored."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ps_protocol.errors import ConfigError
from ps_protocol.times import LONG_PATIENCE_SECONDS
from ps_worker.data.equal_batches import equal_share
from ps_worker.session.device import check_device
from ps_worker.strategies.base import Strategy, clip_in_steps
from ps_worker.strategies.process_group import Placement, ProcessGroup, backend_for, lost_replicas, placement

T = TypeVar("T")


class ReplicatedModule(DistributedDataParallel):
    """A DistributedDataParallel that is otherwise like its module: attributes and ``state_dict`` keys are the same."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in self.__dict__.get("_modules", ()):  # it is being made
                raise
            return getattr(self.module, name)

    def state_dict(self, *arguments: Any, **named: Any) -> Any:
        """As the module's own: without the prefix ``module.``."""
        return self.module.state_dict(*arguments, **named)

    def load_state_dict(self, *arguments: Any, **named: Any) -> Any:
        """As the module's own."""
        return self.module.load_state_dict(*arguments, **named)


class DataParallel(Strategy):
    """A replica per process, each with the whole model, whose gradients DistributedDataParallel averages."""

    def __init__(
        self,
        *,
        devices: int | str | Sequence[str] | None = None,
        communication: str = "auto",
        timeout_seconds: float = LONG_PATIENCE_SECONDS,
        module_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Wait for the other replicas.

        Args:
            devices: How many GPUs of this host are used, or the device of each replica of this host, or "cpu".
            communication: "gloo", "nccl", or "auto", which is nccl on GPUs.
            timeout_seconds: How long an exchange waits for the other replicas.
            module_options: Further arguments of DistributedDataParallel.

        Raises:
            ConfigError: This machine cannot run it.
            Unavailable: The other replicas do not come in time.
        """
        super().__init__()
        place = placement(os.environ)
        self._check_place(place)
        self._device = self._device_of(place, devices)
        self._module_options = dict(module_options or {})
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._group = ProcessGroup(place, backend_for(communication, self._device), timeout_seconds)
        self._seed = self._group.common_seed()

    def _check_place(self, place: Placement) -> None:
        """Raises ConfigError where these replicas are not for this strategy."""

    def _device_of(self, place: Placement, devices: int | str | Sequence[str] | None) -> torch.device:
        return device_of(place, devices)

    @property
    def device(self) -> torch.device:
        """The device of this replica."""
        return self._device

    @property
    def rank(self) -> int:
        """Number of this replica, from 0."""
        return self._group.place.rank

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return self._group.place.replicas

    def _prepare(
        self,
        model: nn.Module,
        optimizer: type[torch.optim.Optimizer] | torch.optim.Optimizer,
        schedulers: tuple[Any, ...],
        arguments: Mapping[str, Any],
        clip_grad_norm: float | None,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        built = optimizer(model.parameters(), **arguments) if isinstance(optimizer, type) else optimizer
        if clip_grad_norm is not None:
            clip_in_steps(built, clip_grad_norm)
        if self._group.alone:
            return model, built
        devices = [self._device] if self._device.type == "cuda" else None
        with lost_replicas():
            return ReplicatedModule(model, device_ids=devices, **self._module_options), built

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module that was given to ``prepare``."""
        return model.module if isinstance(model, ReplicatedModule) else model

    def _distribute(self, loader: Any) -> Any:
        if self._group.alone:
            return loader
        epochs = itertools.count()
        return equal_share(loader, self.rank, self.replicas, self._seed, epochs, self._group.verify_order)

    def run(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """As in ``Strategy``; where another replica is lost meanwhile, raises Unavailable."""
        with lost_replicas():
            return super().run(function, *arguments, **named)

    def accumulate(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Without an exchange in backward passes."""
        return model.no_sync() if isinstance(model, ReplicatedModule) else super().accumulate(model)

    def _all_reduce(self, how: str, tensor: Tensor) -> Tensor:
        return self._group.all_reduce(how, tensor.to(self._device))

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self._group.all_gather(tensor.to(self._device))

    def barrier(self) -> None:
        """Wait until every replica has called this."""
        self._group.barrier()

    def close(self) -> None:
        """Leave the process group, unless the script had opened it."""
        self._group.close()


class Mirrored(DataParallel):
    """Replicas on one host: a process per GPU, or per replica on the CPU. ``ps-run --strategy mirrored`` starts them.

    A script that is run alone is one replica.
    """

    name: ClassVar[str] = "mirrored"

    def _check_place(self, place: Placement) -> None:
        if place.local_replicas != place.replicas:
            raise ConfigError(
                "mirrored replicas are on one host",
                expected=f"{place.replicas} replicas on this host",
                actual=str(place.local_replicas),
                remedy="use the strategy multi_worker_mirrored",
            )


class MultiWorkerMirrored(DataParallel):
    """Replicas on several hosts, by ``TF_CONFIG`` or the variables of torchrun."""

    name: ClassVar[str] = "multi_worker_mirrored"


def device_of(place: Placement, devices: int | str | Sequence[str] | None) -> torch.device:
    """The device of the replica at ``place``. Raises ConfigError where the host's devices and replicas do not match."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices == "cpu" or (devices is None and not gpus):
        return torch.device("cpu")
    if isinstance(devices, str):
        devices = [devices]
    if devices is None or isinstance(devices, int):
        count = gpus if devices is None else devices
        if isinstance(count, bool) or not 0 < count <= gpus:
            raise ConfigError(
                "this host does not have these devices",
                expected=f"1 to {gpus} GPUs" if gpus else "no number: this host has no GPU",
                actual=str(count),
                remedy='give a smaller number, or devices="cpu"',
            )
        devices = [f"cuda:{number}" for number in range(count)]
    if len(devices) != place.local_replicas:
        raise ConfigError(
            "a replica is a process with one device",
            expected=f"{len(devices)} processes on this host, for {', '.join(devices)}",
            actual=f"{place.local_replicas}",
            remedy=f"start the script with ps-run --strategy mirrored --workers {len(devices)}, "
            f"or give {place.local_replicas} in devices=",
        )
    for each in devices:
        check_device(each)
    return torch.device(devices[place.local_rank])
