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
from ps_worker.data.samples import refuse_split_data
from ps_worker.model.declare import checked_clip
from ps_worker.strategies.fit import Callback, Fit, FitSettings, History, Loss, as_loader, evaluate

T = TypeVar("T")

REDUCTIONS = ("mean", "sum")

#: Of torch; named, for importing FSDP takes its time.
_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


class Strategy(ABC):
    """How one script trains: on one device, on replicas, or on parameter servers. Made by ``ps_worker.strategy``.

    Each process of the job runs the script and is one replica. The loss is the mean over the replica's batch, and
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
        """The device of this replica."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number of this replica, from 0."""

    @property
    @abstractmethod
    def replicas(self) -> int:
        """The number of processes that train."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The replicas whose gradients are averaged in one update: what the global batch and a learning rate go by."""
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
        """``model`` on this replica's device, with rank 0's values, and the optimizer that trains it.

        ``optimizer`` is a class, made with ``arguments`` (``lr=…``), or one that is built already over the parameters
        of ``model``, with the ``schedulers`` that are built on it. With ``clip_grad_norm`` each step clips the gradient
        that it applies, the mean over the replicas in sync, to this norm. Every replica calls this alike. Raises
        ConfigError for a model that is wrapped already, for arguments of a built optimizer and for a norm that is not
        positive and finite; UnsupportedOptimizer for an optimizer that this strategy cannot run or was given before.
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
        """The module that was given to ``prepare``."""
        return model

    def distribute(self, loader: Any) -> Any:
        """The part of a DataLoader that is this replica's: in an epoch each sample goes to one replica, once.

        ``batch_size`` is per replica. Torch's random samplers draw the same order on every replica, a new one in each
        epoch; a sampler of the user's own is kept, and has to yield the same on all. Raises ConfigError for data that
        cannot be split, or is split by a DistributedSampler.
        """
        if loader in self._distributed:
            return loader
        if isinstance(loader, DataLoader):
            refuse_split_data(loader)
        made = self._distribute(loader)
        self._distributed.add(made)
        return made

    @abstractmethod
    def _distribute(self, loader: Any) -> Any: ...

    def run(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """``function(*arguments, **named)`` on this replica, with the tensors in them on its device."""
        return function(*self.place(arguments), **self.place(named))

    def place(self, value: T) -> T:
        """``value`` with every tensor in it on this replica's device."""
        return _mapped(lambda tensor: tensor.to(self.device, non_blocking=True), value)

    def accumulate(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A context for all backward passes before an optimizer step but the last: gradients are not averaged there."""
        return nullcontext()

    def reduce(self, how: str, value: T) -> T:
        """The "mean" or "sum" of ``value`` over the replicas, on all of them.

        ``value``: a tensor of the same shape everywhere, a number, or a mapping or sequence of these. Every replica
        calls it. Raises ConfigError for another ``how``.
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
        """The tensors of all replicas, one after the other along the first dimension; its size may differ."""
        tensor = tensor.detach().reshape(-1) if tensor.ndim == 0 else tensor.detach()
        return torch.cat(self._all_gather(tensor)) if self.replicas > 1 else tensor.clone()

    @abstractmethod
    def _all_gather(self, tensor: Tensor) -> list[Tensor]: ...

    def local_results(self, value: T) -> tuple[T, ...]:
        """What the replicas of this process have: one value, for a process is one replica."""
        return (value,)

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every replica has called this."""

    def refresh(self, model: nn.Module) -> None:  # noqa: B027 -- most strategies have nothing to do
        """Bring the newest values into ``model``, for evaluation."""

    def seed_replica(self, seed: int) -> None:
        """Seed torch on this replica with a number of its own, so that dropout differs over the replicas.

        Call it after the model is made: initial values are to be the same everywhere.
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
        """Put the ``state_dict`` of a module and of its optimizer back, before ``epoch``. Every replica calls it."""
        self.unwrap(model).load_state_dict(values)
        optimizer.load_state_dict(state)

    def epoch(self, number: int) -> AbstractContextManager[Any]:
        """Entered by ``fit`` for epoch ``number`` of all fits: ``barrier`` and ``reduce`` within belong to it."""
        return nullcontext()

    def continue_data(self, loader: Any, optimizer: torch.optim.Optimizer, epoch: int) -> None:
        """Have a loader that ``distribute`` has made begin with the order of ``epoch``."""
        for sampler in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
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
        """Train a prepared ``model`` and return the numbers of each epoch.

        ``data`` and ``validation`` are DataLoaders of (input, …, target), distributed here, or tuples of NumPy arrays
        or tensors, of which ``batch_size`` samples make a batch of a replica. ``loss`` and ``metrics`` are functions of
        output and target, means over a batch. ``accumulate`` batches make a step; ``scheduler`` is stepped after each.
        ``precision`` is "fp32", "bf16" or "fp16". ``clip_grad_norm`` is that of ``prepare``, for this fit; where shards
        make means of several workers it is to be given there.

        After each epoch the chief writes ``checkpoint``; where that file is there already, on all replicas' hosts, the
        fit continues from it. A worker that was started again while others train takes its epoch, learning rate and
        history from there, and the parameters from the shards. ``progress`` shows a bar, by default on a terminal.
        Replicas draw different random numbers, so dropout differs. Raises ConfigError for what does not fit,
        UnsupportedOptimizer for one that needs a closure, DamagedData for another file.
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
        """The mean loss and metrics over all samples of ``data``, the same on every replica, which all call it."""
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
