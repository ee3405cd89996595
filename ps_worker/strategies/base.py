"""The interface of every strategy, and what is the same in all of them."""

from __future__ import annotations

import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from ps_protocol.errors import ConfigError, UnsupportedOptimizer
from ps_worker.data.files.batches import FileBatches
from ps_worker.data.samples import Share, refuse_split_data
from ps_worker.model.declare import checked_clip
from ps_worker.strategies.fit import Callback, Fit, FitSettings, History, Loss, as_loader, evaluate

T = TypeVar("T")

REDUCTIONS = ("mean", "sum")

#: Of torch; named, for importing FSDP takes its time.
_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


class Strategy(ABC):
    """How one script trains: on one device, on replicas, or on parameter servers. ``ps_worker.strategy`` makes it.

    Each process of the job runs the script and is one replica. The loss is the mean over the batch of the replica, and
    gradients are averaged over the replicas: nothing is divided by the global batch. A scheduler is stepped once per
    optimizer step. Used from one thread, best as ``with ps_worker.strategy() as s``.
    """

    #: As in ``ps_worker.strategy(name)``.
    name: ClassVar[str]

    def __init__(self) -> None:
        #: The optimizer that belongs to a prepared model, for ``fit``.
        self._optimizers: weakref.WeakKeyDictionary[nn.Module, torch.optim.Optimizer] = weakref.WeakKeyDictionary()
        #: Epochs of the fits so far.
        self._epochs = 0
        #: The norm that an optimizer was prepared to clip to.
        self._clips: weakref.WeakKeyDictionary[torch.optim.Optimizer, float] = weakref.WeakKeyDictionary()
        #: Loaders that ``distribute`` has made.
        self._distributed: weakref.WeakSet[Any] = weakref.WeakSet()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(replica {self.rank} of {self.replicas} on {self.device})"

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of this replica."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number of this replica, from 0."""

    @property
    @abstractmethod
    def replicas(self) -> int:
        """Number of processes that train."""

    @property
    def share(self) -> Share:
        """The part of this replica in data that is split by rank, such as those of a validation."""
        return Share(self.rank, self.replicas, 0)

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose gradients are averaged in one update; global batch and learning rate go by it."""
        return self.replicas

    @property
    def is_chief(self) -> bool:
        """Whether this replica writes files and prints for all of them."""
        return self.rank == 0

    def prepare(
        self,
        model: nn.Module,
        optimizer: type[torch.optim.Optimizer] | torch.optim.Optimizer,
        *,
        schedulers: Iterable[Any] = (),
        clip_grad_norm: float | None = None,
        **arguments: Any,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Move a model to this replica's device, give it the values of rank 0, and return it with the optimizer that
        trains it.

        Every replica makes the same call.

        Args:
            model: The module.
            optimizer: Class of the optimizer, made with ``arguments``; or an optimizer that is built over the
                parameters of ``model``.
            schedulers: Learning-rate schedulers that are built on a built optimizer.
            clip_grad_norm: Norm to which each step clips the gradient that it applies: in sync, the mean over the
                replicas.
            **arguments: Arguments of the class, such as ``lr``.

        Returns:
            The model, wrapped where the strategy needs it, and the optimizer.

        Raises:
            ConfigError: The model is wrapped already, a built optimizer comes with arguments, or the norm is not
                positive and finite.
            UnsupportedOptimizer: This strategy cannot run the optimizer, or it was prepared before.
        """
        _check_model(model)
        _check_optimizer(optimizer, arguments)
        _check_new(optimizer, self._optimizers.values())
        norm = checked_clip(clip_grad_norm) or None
        model.to(self.device)
        prepared, made = self._prepare(model, optimizer, tuple(schedulers), arguments, norm)
        self._optimizers[prepared] = made
        if norm is not None:
            self._clips[made] = norm
        return prepared, made

    @abstractmethod
    def _prepare(
        self,
        model: nn.Module,
        optimizer: type[torch.optim.Optimizer] | torch.optim.Optimizer,
        schedulers: tuple[Any, ...],
        arguments: Mapping[str, Any],
        clip_grad_norm: float | None,
    ) -> tuple[nn.Module, torch.optim.Optimizer]: ...

    def _clipping(self, optimizer: torch.optim.Optimizer, norm: float | None) -> AbstractContextManager[Any]:
        """What ``fit(clip_grad_norm=…)`` enters. Raises ConfigError where ``prepare`` was given another norm."""
        prepared = self._clips.get(optimizer)
        if norm is None or norm == prepared:
            return nullcontext()
        if prepared is not None:
            raise ConfigError(
                "fit() and prepare() are given different norms to clip to",
                expected=f"clip_grad_norm={prepared:g}, as in prepare()",
                actual=f"{norm:g}",
                remedy="give it to prepare() alone",
            )
        return clip_in_steps(optimizer, norm)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that was given to ``prepare``."""
        return model

    def distribute(self, loader: Any) -> Any:
        """Return this replica's part of a DataLoader: in an epoch each sample goes to one replica, once.

        ``batch_size`` is per replica. Torch's random samplers draw the same order on every replica, a new one in each
        epoch. A sampler of the script's own is kept, and has to yield the same order on all replicas.

        The rows of ``files.read`` are leased to the workers of parameter servers; one process trains all of them.

        Args:
            loader: The DataLoader, or batches of files.

        Raises:
            ConfigError: The data cannot be split, or a DistributedSampler has split it.
        """
        if loader in self._distributed or (isinstance(loader, FileBatches) and loader.split):
            return loader
        if isinstance(loader, DataLoader):
            refuse_split_data(loader)
        made = self._distribute(loader)
        self._distributed.add(made)
        return made

    @abstractmethod
    def _distribute(self, loader: Any) -> Any: ...

    def run(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Call ``function(*arguments, **named)`` on this replica, with the tensors in the arguments on its device.

        Args:
            function: One step of the training, for example.
            *arguments: See ``place``.
            **named: See ``place``.

        Returns:
            What ``function`` returned.
        """
        return function(*self.place(arguments), **self.place(named))

    def place(self, value: T) -> T:
        """Return a value with every tensor in it on this replica's device.

        Args:
            value: A tensor, or mappings, lists and tuples of tensors.
        """
        return _mapped(lambda tensor: tensor.to(self.device, non_blocking=True), value)

    def accumulate(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context for all backward passes of an optimizer step but the last: gradients are not averaged there.

        Args:
            model: The prepared model.
        """
        return nullcontext()

    def reduce(self, how: str, value: T) -> T:
        """Return a value reduced over the replicas, on all of them. Every replica makes the same call.

        Args:
            how: "mean" or "sum".
            value: A tensor of the same shape on every replica, a number, or a mapping or sequence of these.

        Raises:
            ConfigError: Another ``how``.
        """
        if how.lower() not in REDUCTIONS:
            raise ConfigError("reduce() cannot do this", expected=" or ".join(REDUCTIONS), actual=how)
        return _mapped(lambda tensor: self._reduce(how.lower(), tensor.detach()), value, numbers=True)

    def _reduce(self, how: str, tensor: Tensor) -> Tensor:
        if how == "mean" and not tensor.is_floating_point():
            tensor = tensor.to(torch.get_default_dtype())
        return self._all_reduce(how, tensor) if self.replicas > 1 else tensor.clone()

    @abstractmethod
    def _all_reduce(self, how: str, tensor: Tensor) -> Tensor: ...

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all replicas, one after the other along the first dimension. Every replica makes the
        same call.

        Args:
            tensor: [n, …], where n may differ between replicas; without dimensions it counts as [1].
        """
        tensor = tensor.detach().reshape(-1) if tensor.ndim == 0 else tensor.detach()
        return torch.cat(self._all_gather(tensor)) if self.replicas > 1 else tensor.clone()

    @abstractmethod
    def _all_gather(self, tensor: Tensor) -> list[Tensor]: ...

    def local_results(self, value: T) -> tuple[T, ...]:
        """Return what the replicas of this process have: one value, for a process is one replica."""
        return (value,)

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every replica has called this."""

    def refresh(self, model: nn.Module) -> None:  # noqa: B027 -- most strategies have nothing to do
        """Put the newest values into ``model``, for evaluation."""

    def seed_replica(self, seed: int) -> None:
        """Seed torch on this replica with a number of its own, so that dropout differs between replicas.

        Call it after the model is made: initial values have to be the same everywhere.

        Args:
            seed: A number that is the same on all replicas.
        """
        torch.manual_seed((seed + self.rank) % 2**63)

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        values: Mapping[str, Any],
        state: dict[str, Any],
        epoch: int,
    ) -> None:
        """Load saved values and state into a prepared model and its optimizer. Every replica makes the same call.

        Args:
            model: The prepared model.
            optimizer: Its optimizer.
            values: ``state_dict`` of the module.
            state: ``state_dict`` of the optimizer.
            epoch: The epoch that follows.
        """
        self.unwrap(model).load_state_dict(values)
        optimizer.load_state_dict(state)

    def epoch(self, number: int) -> AbstractContextManager[Any]:
        """Return the context that ``fit`` enters for an epoch: ``barrier`` and ``reduce`` within belong to it.

        Args:
            number: Number of the epoch, over all fits.
        """
        return nullcontext()

    def continue_data(self, loader: Any, optimizer: torch.optim.Optimizer, epoch: int) -> None:
        """Have a loader that ``distribute`` has made begin with the order of an epoch.

        Args:
            loader: The loader.
            optimizer: The optimizer that trains with it.
            epoch: Number of the epoch, from 0.
        """
        for sampler in (loader, getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
            start = getattr(sampler, "start_epochs", None)
            if start is not None:
                start(epoch)

    def fit(
        self,
        model: nn.Module,
        data: Any,
        *,
        loss: Loss,
        epochs: int = 1,
        steps_per_epoch: int | None = None,
        batch_size: int = 32,
        validation: Any = None,
        metrics: Mapping[str, Loss] | None = None,
        accumulate: int = 1,
        precision: str = "fp32",
        clip_grad_norm: float | None = None,
        scheduler: Any = None,
        callbacks: Sequence[Callback] = (),
        checkpoint: str | Path | None = None,
        progress: bool | None = None,
    ) -> History:
        """Train a prepared model, by the words of Keras, and return the numbers of each epoch.

        Random numbers differ between replicas, so dropout does. After each epoch the chief writes ``checkpoint``; where
        that file exists already, the fit continues from it. A worker that was started again while others train takes
        its epoch, learning rate and history from the file, and the parameters from the shards.

        Args:
            model: The prepared model.
            data: A DataLoader of (input, …, target), which is distributed here; batches of files, whose ``transform``
                makes such tuples; or a tuple of NumPy arrays or tensors.
            loss: Function of output and target: the mean over a batch.
            epochs: Number of epochs.
            steps_per_epoch: Most optimizer steps of an epoch. None: all data.
            batch_size: Samples in a batch of a replica, where ``data`` are arrays.
            validation: As ``data``: what is evaluated after each epoch.
            metrics: Functions as ``loss``, by name.
            accumulate: Batches that make one optimizer step.
            precision: "fp32", "bf16" or "fp16".
            clip_grad_norm: As in ``prepare``, for this fit; where shards average several workers, give it to
                ``prepare``.
            scheduler: Learning-rate scheduler, stepped after each optimizer step.
            callbacks: See ``ps_worker.strategies.fit.Callback``.
            checkpoint: File that is written after each epoch. It has to be readable on the hosts of all replicas.
            progress: Show a bar. None: on a terminal.

        Returns:
            For each epoch "loss" and the metrics, over the samples of all replicas, and those of the validation with
            the prefix "val_".

        Raises:
            ConfigError: The model is not prepared, or an argument does not fit.
            UnsupportedOptimizer: The optimizer needs a closure.
            DamagedData: ``checkpoint`` is another file.
        """
        optimizer = self._optimizers.get(model)
        if optimizer is None:
            raise ConfigError("fit() got a model that is not prepared", remedy="call model, optimizer = s.prepare(…)")
        _check_without_closure(optimizer)
        given = FitSettings(
            loss=loss,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            accumulate=accumulate,
            precision=precision,
            scheduler=scheduler,
            metrics=metrics or {},
            callbacks=callbacks,
            checkpoint=Path(checkpoint) if checkpoint is not None else None,
            progress=progress,
        )
        clipping = self._clipping(optimizer, checked_clip(clip_grad_norm) or None)
        loader = self.distribute(as_loader(data, batch_size, shuffle=True))
        checked = as_loader(validation, batch_size, shuffle=False)
        if self.replicas > 1:
            self.seed_replica(torch.initial_seed())
        first, self._epochs = self._epochs, self._epochs + epochs
        with clipping:
            return Fit(self, model, optimizer, given, first).run(loader, checked)

    def evaluate(
        self,
        model: nn.Module,
        data: Any,
        *,
        loss: Loss,
        metrics: Mapping[str, Loss] | None = None,
        batch_size: int = 32,
    ) -> dict[str, float]:
        """Return the mean loss and metrics over all samples. Every replica makes the same call, and gets the same
        numbers.

        Args:
            model: The prepared model.
            data: See ``fit``.
            loss: See ``fit``.
            metrics: See ``fit``.
            batch_size: See ``fit``.
        """
        return evaluate(self, model, as_loader(data, batch_size, shuffle=False), loss, metrics or {})

    @abstractmethod
    def close(self) -> None:
        """Leave the other replicas. Safe to repeat."""


def clip_in_steps(optimizer: torch.optim.Optimizer, norm: float) -> RemovableHandle:
    """Clip all gradients of ``optimizer`` together to ``norm`` at the beginning of each of its steps.

    Gradients are unscaled and averaged by then. The handle, which is a context, ends it.
    """

    def clip(stepped: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in stepped.param_groups for p in group["params"]]
        # A fused step divides by GradScaler's scale itself, so here gradients still have it.
        scale = getattr(stepped, "grad_scale", None)
        torch.nn.utils.clip_grad_norm_(parameters, norm if scale is None else norm * float(scale))

    return optimizer.register_step_pre_hook(clip)


def _check_model(model: object) -> None:
    """Raises ConfigError for what is no module, and for a model that another tool distributes already."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "prepare() cannot train this",
            expected="a torch.nn.Module",
            actual=type(model).__name__,
            remedy="give the module first, then the optimizer",
        )
    for name, module in model.named_modules():
        wrapper = next((kind.__name__ for kind in type(module).__mro__ if _wraps(kind)), None)
        if wrapper is not None:
            raise ConfigError(
                f"{name or 'the model'} is wrapped in {wrapper} already",
                expected="the module itself",
                actual=wrapper,
                remedy="give prepare() the plain module: the strategy wraps it where that is needed",
            )


def _wraps(kind: type) -> bool:
    return kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch.")


def _check_optimizer(optimizer: object, arguments: Mapping[str, Any]) -> None:
    """Raises UnsupportedOptimizer for what is none, ConfigError for arguments beside one that is built."""
    if isinstance(optimizer, torch.optim.Optimizer):
        if arguments:
            raise ConfigError(
                "prepare() has an optimizer that is built, and arguments for a new one",
                actual=", ".join(arguments),
                remedy="set them where the optimizer is built, or give prepare() its class",
            )
    elif not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise UnsupportedOptimizer(
            "prepare() has no optimizer",
            expected="a class of torch.optim, or an optimizer",
            actual=repr(optimizer)[:80],
            remedy="call prepare(model, torch.optim.AdamW, lr=1e-3)",
        )


def _check_new(optimizer: object, prepared: Iterable[torch.optim.Optimizer]) -> None:
    """Raises UnsupportedOptimizer for one of ``prepared``."""
    if any(optimizer is each for each in prepared):
        raise UnsupportedOptimizer(
            "this optimizer was prepared before",
            expected="an optimizer that prepare() was not given yet",
            actual=type(optimizer).__name__,
            remedy="use the model and optimizer that prepare() returned then",
        )


def _check_without_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raises UnsupportedOptimizer for one whose step needs a closure, such as LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedOptimizer(
            "fit() makes steps without a closure",
            expected="an optimizer whose step() needs none",
            actual=type(optimizer).__name__,
            remedy="write the loop with s.run() and optimizer.step(closure), or choose another optimizer",
        )


def _mapped(function: Callable[[Tensor], Tensor], value: T, *, numbers: bool = False) -> T:
    """``value`` with ``function`` applied to every tensor in its mappings, lists and tuples.

    With ``numbers`` plain numbers are tensors of one element to ``function``, and numbers again afterwards.
    """
    if isinstance(value, Tensor):
        return function(value)  # type: ignore[return-value]  # a tensor for a tensor
    if numbers and isinstance(value, int | float) and not isinstance(value, bool):
        return function(torch.tensor(value, dtype=torch.float64)).item()  # type: ignore[return-value]
    if isinstance(value, Mapping):
        return type(value)({key: _mapped(function, each, numbers=numbers) for key, each in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple | list):
        parts = [_mapped(function, each, numbers=numbers) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
