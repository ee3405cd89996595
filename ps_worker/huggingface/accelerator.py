"""``accelerate.Accelerator`` whose optimizers run on the shards, and this worker in accelerate's process state."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.checkpointing import save_accelerator_state
from accelerate.data_loader import prepare_data_loader
from accelerate.optimizer import AcceleratedOptimizer, patch_optimizer_step
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, recursively_apply
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from ps_protocol.errors import ConfigError
from ps_protocol.logs import EventLogger
from ps_worker.cluster import Cluster
from ps_worker.connection import connected
from ps_worker.data.files.batches import FileBatches
from ps_worker.optimizer import PsOptimizer

logger = EventLogger("ps_worker")

_NAME = "accelerate"
"""Name of the collective calls."""


class PsAccelerator(Accelerator):
    """An ``accelerate.Accelerator`` for a worker of a job: ``prepare`` adopts optimizers and splits loaders.

    ``gather``, ``gather_for_metrics`` and ``reduce`` go through the coordinator, which bounds their size
    (``Cluster.all_gather``). Gradients do not: the shards average them.
    """

    def __init__(
        self,
        cluster: Cluster | None = None,
        *,
        optimizer_options: Mapping[str, Any] = MappingProxyType({}),
        **arguments: Any,
    ) -> None:
        """Join the job of the environment, unless ``cluster`` is given.

        Args:
            cluster: The connection. None: the process joins, and leaves the job when it ends.
            optimizer_options: Arguments of ``Cluster.adopt``, such as ``{"wire": "int8"}``.
            **arguments: Arguments of ``Accelerator``.

        Raises:
            ConfigError: torch.distributed is in use, or fp16 is asked for on the CPU.
            PsError: As ``ps_worker.connect``.
        """
        self.cluster = connected() if cluster is None else cluster
        check_precision(self.cluster, arguments.get("mixed_precision"))
        self._optimizer_options = dict(optimizer_options)
        set_process_state(self.cluster)
        super().__init__(**arguments)

    #: Rank 0 is in accelerate's own ``save_state``.
    _saves_alone = False

    #: The warning about gradients that are clipped before their mean is still to come.
    _clips_unsaid = True

    #: Whether loaders that are prepared are split among the workers. Where not, a worker has all there is to gather.
    splits_data = True

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects, as ``Accelerator.prepare``. A torch optimizer is adopted for the module that is given with
        it.

        Args:
            *objects: Modules, optimizers, schedulers, loaders.
            device_placement: As in accelerate.

        Raises:
            ConfigError: An optimizer comes without its module, or a loader is the batches of files.
            PsError: As ``Cluster.adopt``.
        """
        refuse_files(objects)
        modules = [each for each in objects if isinstance(each, torch.nn.Module)]
        for module in modules:
            # The shards' values are put into the parameters in place: they have to be where they stay.
            module.to(self.device)
        schedulers = [each for each in objects if isinstance(each, LRScheduler)]
        adopted = [self._adopted(each, modules, schedulers) for each in objects]
        return super().prepare(*adopted, device_placement=device_placement)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wrap an optimizer of the cluster. Its state stays on the shards: nothing is pulled or pushed."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        if not isinstance(optimizer, PsOptimizer):
            raise _without_module(optimizer)
        wrapped = WeighedOptimizer(optimizer, self.scaler)
        self._optimizers.append(wrapped)
        return wrapped

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Wrap a scheduler, which advances once per step of the optimizer, whatever the number of workers."""
        wrapped = super().prepare_scheduler(scheduler)
        wrapped.split_batches = True
        return wrapped

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> DataLoader[Any]:
        """Return this worker's part: every sample is in one batch of one worker, and all workers have as many batches.

        ``dispatch_batches`` and ``split_batches`` have no effect.

        Args:
            data_loader: The loader.
            device_placement: As in accelerate.
            slice_fn_for_dispatch: Has no effect.

        Raises:
            ConfigError: The data cannot be split so.
        """
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader)
        part = self._part(data_loader) if self.splits_data else data_loader
        prepared = prepare_data_loader(
            part,
            self.device,
            # It is split already.
            num_processes=1,
            process_index=0,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            dispatch_batches=False,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(prepared)
        return prepared

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all workers, also inside containers.

        Args:
            tensor: A tensor, or a container of tensors, 64 KiB each at most.

        Raises:
            PsError: As ``Cluster.all_gather``.
        """
        return recursively_apply(self._gathered, tensor, error_on_other_type=True) if self.splits_data else tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As ``gather``. No sample is in two batches, so nothing has to be left out."""
        return self.gather(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce tensors over all workers, also inside containers.

        Args:
            tensor: A tensor, or a container of tensors.
            reduction: "sum", "mean", "max" or "none".
            scale: Factor of the result.

        Raises:
            PsError: As ``Cluster.all_reduce``.
        """
        if reduction == "none":
            return tensor

        def reduced(each: torch.Tensor) -> torch.Tensor:
            return self.cluster.all_reduce(each, reduction, name=_NAME) * scale

        return recursively_apply(reduced, tensor, error_on_other_type=True)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip this worker's gradients, before their mean over the workers, and return their norm before that.

        Where the shards clip to this norm already (``optimizer_options={"clip_grad_norm": …}``), which in sync is the
        norm of the mean as in one process, this only finds the norm. Where clipping before the mean differs, a warning
        says so once.

        Args:
            parameters: As in torch.
            max_norm: As in torch.
            norm_type: As in torch.

        Raises:
            ConfigError: The shards clip to another norm.
        """
        norms = {each.optimizer.clip_grad_norm for each in self._optimizers if isinstance(each.optimizer, PsOptimizer)}
        on_shards = {norm for norm in norms if norm is not None}
        if on_shards and not math.isinf(max_norm):
            if norms != {max_norm} or norm_type != 2:
                raise ConfigError(
                    "the shards clip gradients already, and not to this norm",
                    expected=", ".join(f"max_norm={norm:g}" for norm in sorted(on_shards)) + " and norm_type=2",
                    actual=f"max_norm={max_norm:g}, norm_type={norm_type:g}",
                    remedy="leave clip_grad_norm_ out, or clip_grad_norm of the optimizer",
                )
            max_norm = math.inf
        elif norms and not math.isinf(max_norm) and self.cluster.world_size > 1 and self._clips_unsaid:
            self._clips_unsaid = False
            logger.warning(
                "model.options",
                "clip_grad_norm_ clips the gradients of each worker, before their mean; "
                'PsAccelerator(optimizer_options={"clip_grad_norm": %g}) clips the mean, as one process does',
                max_norm,
            )
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def wait_for_everyone(self) -> None:
        """Wait until every live worker has called this."""
        if not self._saves_alone:
            self.cluster.barrier()

    def save_state(self, *arguments: Any, **named: Any) -> Any:
        """Save the state of the training, as in accelerate; every worker calls it.

        Rank 0 writes what all have in common, and alone reads the state of the optimizer from the shards. The others
        wait for it, then write their random states where they see the folder.

        Args:
            *arguments: As in accelerate.
            **named: As in accelerate.

        Returns:
            The folder, on every worker; None where rank 0 is not there, and nothing was written.
        """
        self.wait_for_everyone()
        if self.is_main_process:
            location = None
            try:
                location = self._save_alone(*arguments, **named)
            finally:
                self.cluster.gather_values(None if location is None else str(location), name=_NAME)
            return location
        folder = self.cluster.gather_values(None, name=_NAME).get(0)
        if folder is None:
            return None
        self.project_configuration.iteration += 1
        if Path(folder).is_dir():
            save_accelerator_state(folder, [], [], [], [], self.state.process_index, self.step)
        return Path(folder)

    def load_state(self, *arguments: Any, **named: Any) -> None:
        """Load a saved state, as in accelerate; every worker calls it, and it returns when every worker has loaded.

        Each worker reads the folder, and one sends the state of the optimizer to the shards.

        Args:
            *arguments: As in accelerate.
            **named: As in accelerate.
        """
        super().load_state(*arguments, **named)
        self.wait_for_everyone()

    def _save_alone(self, *arguments: Any, **named: Any) -> Any:
        # With automatic naming accelerate waits for the others in between; here they are not in that code.
        self._saves_alone = True
        try:
            return super().save_state(*arguments, **named)
        finally:
            self._saves_alone = False

    def _adopted(self, item: Any, modules: list[torch.nn.Module], schedulers: list[LRScheduler]) -> Any:
        if not isinstance(item, torch.optim.Optimizer) or isinstance(item, PsOptimizer | AcceleratedOptimizer):
            return item
        own = {id(parameter) for group in item.param_groups for parameter in group["params"]}
        for module in [*modules, *self._models]:
            if own <= {id(parameter) for parameter in module.parameters()}:
                following = [each for each in schedulers if getattr(each, "optimizer", None) is item]
                return self.cluster.adopt(item, module, following, **self._optimizer_options)
        raise _without_module(item)

    def _part(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        return self.cluster.shard(loader, lease=False, even=not isinstance(loader.dataset, IterableDataset))

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = self.cluster.all_gather(tensor, name=_NAME)
        return torch.cat([part if part.ndim else part[None] for part in parts]).to(tensor.device)


def over_cluster(accelerator: Accelerator, cluster: Cluster, optimizer_options: Mapping[str, Any]) -> PsAccelerator:
    """Make ``accelerator`` a ``PsAccelerator``, in place: a ``Trainer`` makes its own."""
    accelerator.__class__ = PsAccelerator
    accelerator.cluster = cluster
    accelerator._optimizer_options = dict(optimizer_options)
    return accelerator


def refuse_files(data: Iterable[object]) -> None:
    """Raises ConfigError for the batches of files: every worker has to have as many batches here."""
    for each in data:
        if isinstance(each, FileBatches):
            raise ConfigError(
                "the batches of files are taken neither by PsTrainer nor by PsAccelerator.prepare",
                expected="a Dataset, or a DataLoader, of which every worker has as many batches",
                actual="the batches of cluster.files or files.read",
                remedy='load them with datasets.load_dataset("parquet", data_files=…), or iterate '
                "accelerator.cluster.files(…) in a loop of your own",
            )


def _without_module(optimizer: torch.optim.Optimizer) -> ConfigError:
    return ConfigError(
        f"prepare() got a {type(optimizer).__name__} without the module of its parameters",
        expected="accelerator.prepare(model, optimizer, …) in one call",
        actual="the optimizer alone",
        remedy="give prepare() the model as well",
    )


class WeighedOptimizer(AcceleratedOptimizer):
    """Wraps an optimizer of the cluster: steps once per accumulation, with ``weight`` as the weight of the push.

    The state of the optimizer stays on the shards: the wrapper neither pulls nor pushes it.
    """

    def __init__(self, optimizer: PsOptimizer, scaler: Any = None) -> None:
        #: The number of samples or tokens of the next step; None: each push weighs the same.
        self.weight: float | None = None
        super().__init__(optimizer, device_placement=False, scaler=scaler)
        if scaler is not None:
            self._optimizer_patched_step_method = patch_optimizer_step(self, self._push)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """As in accelerate. Raises what the optimizer's ``step`` raises."""
        if self.scaler is not None:
            super().step(closure)
        elif self.gradient_state.sync_gradients:
            self._push(closure)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped, by the gradient scaler or by the policy for NaN."""
        return bool(self._is_overflow or self.optimizer.step_was_skipped)

    def _push(self, closure: Callable[[], float] | None = None) -> Any:
        # The class's method: the scaler's path has put another one on the instance.
        return type(self.optimizer).step(self.optimizer, closure, weight=self.weight)


def set_process_state(cluster: Cluster) -> None:
    """Have accelerate report the rank, the number of workers and the device of ``cluster``.

    Accelerate keeps them in one object per process, which it shares with ``TrainingArguments``. The kind of
    distribution stays "none", so that neither of them opens torch.distributed. Raises ConfigError where it is open.
    """
    if not PartialState._shared_state and int(os.environ.get("LOCAL_RANK", -1)) >= 0:
        raise _distributed("LOCAL_RANK is set, which has accelerate open torch.distributed")
    state = PartialState()
    if state.distributed_type is not DistributedType.NO:
        raise _distributed(f"accelerate has opened torch.distributed ({state.distributed_type.value})")
    state.num_processes = cluster.world_size
    state.process_index = state.local_process_index = cluster.rank
    state.device = cluster.device


def check_precision(cluster: Cluster, precision: object) -> None:
    """Raises ConfigError for mixed precision with fp16 on the CPU: accelerate would compute in full precision there."""
    asked = precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if str(asked) == "fp16" and cluster.device.type == "cpu":
        raise ConfigError(
            "accelerate has no mixed precision with fp16 on the CPU",
            expected="a GPU, or another precision",
            actual="fp16 on the device cpu",
            remedy="use bf16, which needs no scaled gradients, or PS_DEVICE=cuda where there is a GPU",
        )


def _distributed(what: str) -> ConfigError:
    return ConfigError(
        what,
        expected="workers of torch-ps alone: they exchange gradients through the shards",
        actual="two kinds of distribution",
        remedy="start the script with ps-run, not with torchrun or accelerate launch",
    )
