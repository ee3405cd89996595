"""The strategies whose variables are on shards: parameter_server and central_storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ps_protocol.errors import ConfigError, Unavailable
from ps_protocol.model.spec import Mode
from ps_protocol.security.settings import SecuritySettings
from ps_worker.connection import connect
from ps_worker.data.datasets import share_of
from ps_worker.data.files.batches import FileBatches
from ps_worker.data.leased_loader import LeasedLoader
from ps_worker.data.samples import Share
from ps_worker.optimizer import PsOptimizer
from ps_worker.strategies.base import Strategy

_FIT, _RESTORE = "fit", "fit restores"
"""Names of exchanges: those of the epochs of a fit, and of what comes before them."""


class ParameterServer(Strategy):
    """Variables on shards, which run the optimizer: workers at their own pace, or in step with ``mode="sync"``."""

    name: ClassVar[str] = "parameter_server"

    def __init__(
        self,
        coordinator: str | None = None,
        *,
        mode: str | None = None,
        staleness: int | None = None,
        backup: int = 0,
        grace_seconds: float = 0.0,
        model_options: Mapping[str, Any] | None = None,
        role: str | None = None,
        rank: int | None = None,
        device: str | None = None,
        transport: str | None = None,
        connect_timeout_seconds: float | None = None,
        reconnect_timeout_seconds: float | None = None,
        security: SecuritySettings | None = None,
        local: bool = True,
    ) -> None:
        """Join a job; with no address, the script starts servers of its own.

        Args:
            coordinator: See ``ps_worker.connect``.
            mode: Consistency mode of the whole job, see ``Cluster.set_mode``. None: the job keeps its own.
            staleness: See ``Cluster.set_mode``.
            backup: See ``Cluster.set_mode``.
            grace_seconds: See ``Cluster.set_mode``.
            model_options: Arguments of ``Cluster.optimizer``: wire, overlap, nonfinite, buffers, writes, stale.
            role: See ``ps_worker.connect``.
            rank: See ``ps_worker.connect``.
            device: See ``ps_worker.connect``.
            transport: See ``ps_worker.connect``.
            connect_timeout_seconds: See ``ps_worker.connect``.
            reconnect_timeout_seconds: See ``ps_worker.connect``.
            security: See ``ps_worker.connect``.
            local: See ``ps_worker.connect``.

        Raises:
            ConfigError: An option does not fit.
            PsError: As ``ps_worker.connect`` and ``Cluster.set_mode``.
        """
        super().__init__()
        if mode is None and (staleness is not None or backup or grace_seconds):
            raise ConfigError(
                "staleness, backup and grace_seconds belong to a mode", remedy="give mode=, too, or leave them out"
            )
        self._model_options = dict(model_options or {})
        if "clip_grad_norm" in self._model_options:
            raise ConfigError(
                "clip_grad_norm is no option of a strategy's models",
                expected="wire, overlap, nonfinite, buffers, writes, stale",
                actual="clip_grad_norm",
                remedy="give it to prepare(), which works under every strategy",
            )
        #: The connection: ``follow``, ``report``, tables and whatever else only parameter servers have.
        self.cluster = connect(
            coordinator,
            role=role,
            rank=rank,
            device=device,
            transport=transport,
            connect_timeout_seconds=connect_timeout_seconds,
            reconnect_timeout_seconds=reconnect_timeout_seconds,
            security=security,
            local=local,
        )
        self._session = self.cluster._session
        #: The name under which exchanges are counted, and the section in it.
        self._exchanges = "strategy", 0
        self._begin(mode, staleness, backup, grace_seconds)

    def _begin(self, mode: str | None, staleness: int | None, backup: int, grace_seconds: float) -> None:
        if mode is None or self.cluster.role != "worker":
            return
        try:
            self.cluster.set_mode(mode, staleness=staleness, backup=backup, grace_seconds=grace_seconds)
            # What is asked of this view next goes by the mode: how data is split, and how many replicas are in sync.
            patience_seconds = self._session.patience_seconds
            seen = self._session.wait_for(lambda view: view.consistency.mode.value == mode, patience_seconds)
            if not seen:
                raise Unavailable(
                    f"the job's mode is not seen to be {mode} after {patience_seconds:g} s",
                    remedy="see whether another process changes the mode of this job",
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ParameterServer:
        self.cluster.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cluster.__exit__(kind, error, traceback)

    @property
    def device(self) -> torch.device:
        """As ``Cluster.device``."""
        return self.cluster.device

    @property
    def rank(self) -> int:
        """As ``Cluster.rank``."""
        return self.cluster.rank

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0; never an evaluator."""
        return self.rank == 0 and self.cluster.role == "worker"

    @property
    def replicas(self) -> int:
        """The workers of the job; in an elastic job, the live ones."""
        return self.cluster.world_size

    @property
    def share(self) -> Share:
        """As in ``Strategy``; where workers come and go, among the live ones."""
        return share_of(self._session)

    @property
    def num_replicas_in_sync(self) -> int:
        """The workers in sync; 1 in the other modes, where an update is made of one worker's gradients."""
        return self.replicas if self._session.consistency.mode is Mode.SYNC else 1

    def _prepare(
        self,
        model: nn.Module,
        optimizer: type[torch.optim.Optimizer] | torch.optim.Optimizer,
        schedulers: tuple[Any, ...],
        arguments: Mapping[str, Any],
        clip_grad_norm: float | None,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        options = self._model_options | {"clip_grad_norm": clip_grad_norm}
        if isinstance(optimizer, type):
            return model, self.cluster.optimizer(optimizer, model, **options, **arguments)
        return model, self.cluster.adopt(optimizer, model, schedulers, **options)

    def _clipping(self, optimizer: torch.optim.Optimizer, norm: float | None) -> AbstractContextManager[Any]:
        """As in ``Strategy``. Raises ConfigError where only shards can clip the mean, without a norm in ``prepare``."""
        if norm is not None and self._clips.get(optimizer) is None and self.num_replicas_in_sync > 1:
            raise ConfigError(
                "fit() cannot clip a mean that shards make of several workers' gradients",
                expected=f"prepare(…, clip_grad_norm={norm:g})",
                actual="a model that was prepared without clip_grad_norm",
                remedy="give clip_grad_norm to prepare(), which works under every strategy",
            )
        return super()._clipping(optimizer, norm)

    def _distribute(self, loader: Any) -> Any:
        if isinstance(loader, FileBatches):
            return self.cluster.shard(loader)
        # In step, a worker that has no batch left would keep those waiting that have.
        if self._session.consistency.mode is Mode.SYNC and not self._session.elastic:
            return self.cluster.shard(loader, even=True)
        return self.cluster.shard(loader)

    def _all_reduce(self, how: str, tensor: Tensor) -> Tensor:
        name, section = self._exchanges
        return self.cluster.all_reduce(tensor, how, name=name, section=section)

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        name, section = self._exchanges
        return self.cluster.all_gather(tensor, name=name, section=section)

    @contextmanager
    def epoch(self, number: int) -> Iterator[None]:
        """As in ``Strategy``; a worker that comes to an epoch which the others have passed gets what they exchanged."""
        before, self._exchanges = self._exchanges, (_FIT, number)
        try:
            yield
        finally:
            self._exchanges = before

    def barrier(self) -> None:
        """As ``Cluster.barrier``: also brings the newest parameters into every model."""
        name, section = self._exchanges
        if name == _FIT:
            self._meet(name, section)
        else:
            self.cluster.barrier()

    def _meet(self, name: str, section: int) -> None:
        """A barrier that a worker passes at once which begins its script again, where the others have passed it."""
        models = self.cluster._models
        for model in models:
            model.finish()
        self.cluster.gather_values(None, name=name, section=section)
        models.pull()

    def refresh(self, model: nn.Module) -> None:
        """As the ``pull`` of its optimizer."""
        optimizer = self._optimizers.get(model)
        if isinstance(optimizer, PsOptimizer):
            optimizer.pull()

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        values: Mapping[str, Any],
        state: dict[str, Any],
        epoch: int,
    ) -> None:
        """As in ``Strategy``; the chief's values become the cluster's, unless the cluster's are newer."""
        if joined_running(optimizer):
            for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
                group.update({name: value for name, value in saved.items() if name != "params"})
            return
        if self.is_chief and isinstance(optimizer, PsOptimizer):
            model.load_state_dict(values)
            optimizer.assign()
        optimizer.load_state_dict(state)
        self._meet(_RESTORE, epoch)

    def continue_data(self, loader: Any, optimizer: torch.optim.Optimizer, epoch: int) -> None:
        """As in ``Strategy``. The coordinator of a new job leases the first epoch, whatever the checkpoint has."""
        leased = isinstance(loader, LeasedLoader) or (isinstance(loader, FileBatches) and loader.leased)
        if not leased or joined_running(optimizer):
            super().continue_data(loader, optimizer, epoch)

    def close(self) -> None:
        """Leave the job; servers of the script's own end."""
        self.cluster.close()


class CentralStorage(ParameterServer):
    """Variables in the memory of this host, once for all replicas, which train in step (mode sync).

    All processes are on one host: ``ps-run --strategy central_storage``. Every replica has as many batches.
    """

    name: ClassVar[str] = "central_storage"

    def __init__(
        self,
        coordinator: str | None = None,
        *,
        model_options: Mapping[str, Any] | None = None,
        rank: int | None = None,
        device: str | None = None,
        local: bool = True,
    ) -> None:
        """Join a job on this host.

        Args:
            coordinator: See ``ps_worker.connect``.
            model_options: See ``ParameterServer``.
            rank: See ``ps_worker.connect``.
            device: See ``ps_worker.connect``.
            local: See ``ps_worker.connect``.

        Raises:
            ConfigError: Workers of the job come and go.
            PsError: As ``ps_worker.connect``.
        """
        super().__init__(
            coordinator,
            mode="sync",
            model_options=model_options,
            rank=rank,
            device=device,
            transport="shm",
            local=local,
        )
        if self._session.elastic:
            self.close()
            raise ConfigError(
                "central_storage needs a fixed number of workers",
                actual="a job that workers join and leave",
                remedy="start the coordinator with --workers N, or use the strategy parameter_server",
            )

    def _prepare(
        self,
        model: nn.Module,
        optimizer: type[torch.optim.Optimizer] | torch.optim.Optimizer,
        schedulers: tuple[Any, ...],
        arguments: Mapping[str, Any],
        clip_grad_norm: float | None,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        made = super()._prepare(model, optimizer, schedulers, arguments, clip_grad_norm)
        if self._session.progress.transport != "shm":
            raise ConfigError(
                "central_storage keeps the variables in memory that it shares with the shards",
                expected="transport shm",
                actual=self._session.progress.transport,
                remedy="run coordinator, shards and workers on one host as one user, or use the strategy "
                'parameter_server with mode="sync"',
            )
        return made


def joined_running(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the model had been trained when this worker came: what the shards have is newer than a file."""
    return isinstance(optimizer, PsOptimizer) and optimizer._model.pipeline.joined_running
