"""``Cluster``: what a training script does in its job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ps_protocol.cluster.scaling import ScaleAsk
from ps_protocol.cluster.view import Role
from ps_protocol.errors import ConfigError
from ps_protocol.model.spec import Consistency, choice
from ps_protocol.security.settings import SecuritySettings
from ps_protocol.wire.formats import Wire
from ps_worker.adopt import adopt_optimizer
from ps_worker.collectives.collectives import Collectives
from ps_worker.data.datasets import Datasets
from ps_worker.embedded import EmbeddedCluster
from ps_worker.evaluator.evaluator import follow
from ps_worker.model.bindings import Source
from ps_worker.model.declare import BufferPolicy, named_arguments
from ps_worker.multi_model.trained_models import TrainedModels
from ps_worker.on_shards import declare_optimizer
from ps_worker.optimizer import PsOptimizer
from ps_worker.session.reporting import plain_metrics
from ps_worker.session.session import Session
from ps_worker.session.terminate import Terminated, leave_reason, warn_of_no_step
from ps_worker.step.summary import Style, Writes
from ps_worker.tables import factories
from ps_worker.tables.prefetch import BatchIds, Prefetch

T = TypeVar("T")


class Cluster:
    """A worker's or evaluator's connection to its job. Used from one thread, best as ``with connect() as cluster``.

    At the end of the ``with`` block it leaves the job, so that no other member waits for it, without hiding the
    exception that ended the block. A coordinator that is away is waited for then, for ``reconnect_timeout_seconds``
    after a clean end, else for seconds; Ctrl-C ends that. SIGTERM ends the block too, where the script has no handler
    of its own.
    """

    embedding = staticmethod(factories.embedding)
    embedding_bag = staticmethod(factories.embedding_bag)
    embedding_bags = staticmethod(factories.embedding_bags)
    convert_embeddings = staticmethod(factories.convert_embeddings)

    def __init__(self, session: Session, embedded: EmbeddedCluster | None = None, name: str | None = None) -> None:
        """``embedded``: the servers of this script alone, which end with this object. ``name``: see ``connect``."""
        self._session = session
        self._embedded = embedded
        session.check_own_servers = embedded.check if embedded is not None else session.check_own_servers
        self._models = TrainedModels(session, name or "model")
        self._collectives = Collectives(session, self._models)
        self._datasets = Datasets(session, self._models.idle, f"{name}-data" if name else "data")
        #: This process has left the job; it has called ``follow``, as workers may do too.
        self._left = self._followed = False

    def __enter__(self) -> Self:
        self._session.termination.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._leave(leave_reason(error), terminated=isinstance(error, Terminated))
        finally:
            self._session.termination.remove()

    def __repr__(self) -> str:
        return f"Cluster({self.role} {self.rank} of {self.world_size}, coordinator {self._session.config.coordinator})"

    @property
    def rank(self) -> int:
        """Number of this worker, from 0; an evaluator's number among evaluators."""
        return self._session.rank

    @property
    def world_size(self) -> int:
        """The number of workers of the job; in an elastic job, of live workers."""
        view = self._session.view
        return view.expected_workers or len(view.live(Role.WORKER))

    @property
    def device(self) -> torch.device:
        """The device for the model: the ``device`` argument, else ``PS_DEVICE``, else a GPU by rank, else the CPU."""
        return self._session.device

    @property
    def role(self) -> str:
        """What this process is: "worker" or "evaluator"."""
        return self._session.config.role.value

    @property
    def seed(self) -> int:
        """The job's seed, the same on every member."""
        return self._session.seed

    def optimizer(
        self,
        torch_class: type[torch.optim.Optimizer],
        model: Source,
        *positional: Any,
        name: str | None = None,
        nonfinite: str = "refuse",
        buffers: BufferPolicy = "rank0",
        wire: str | None = None,
        overlap: bool = False,
        writes: str = "assign",
        tables: Iterable[torch.nn.Module] = (),
        module: torch.nn.Module | None = None,
        clip_grad_norm: float | None = None,
        **arguments: Any,
    ) -> PsOptimizer:
        """Place ``model`` on the shards, which run ``torch_class(…, *positional, **arguments)`` on it.

        ``model`` is a module, or anything that torch.optim takes; where it is parameters or groups, ``module`` is the
        module of their buffers, tables and names. On return its values are rank 0's, or those the shards have already.
        Every worker calls this for the same models in the same order; ``name`` defaults to "model", "model-1", … in
        that order (see ``connect``). ``nonfinite`` is the policy for NaN and infinite gradients: "refuse", "skip" or
        "allow". ``buffers`` selects the buffers that are kept, "rank0", "average" or "local", of all or by name:
        ``buffers={"vq": "local"}`` for those of one module, and "rank0" for the others.

        ``wire`` is a format that makes payloads on a network smaller: "bf16", "fp16", "int8" or "topk:RATIO"
        (docs/codecs.md); shared memory does not use it. With ``overlap`` a step returns at once, and the exchange with
        the shards runs while the next gradients are computed. The parameters then lack this worker's own last push,
        which ssp bounds include. In sync, and in ssp(0), ``step`` waits as without it. With ``clip_grad_norm`` shards
        clip gradients to this norm, over all of the model: in sync the mean over the workers (docs/optimizers.md).

        The tables of embeddings in ``model`` are part of it, with row optimizers of their own. Where ``model`` is no
        module, they are found in ``module`` and the modules ``tables``. ``overlap`` is not possible with tables; see
        ``prefetch``.

        ``writes`` is the policy for values that are set after this call (``load_state_dict``, clamps, ``init``):
        "assign" makes them the cluster's from the next step on, and raises an error where updates of other workers
        would be lost; "refuse" always raises an error; "ignore" drops them (docs/guarantees.md).

        Raises ModelMismatch when workers declare different models, UnsupportedOptimizer for what shards cannot run.
        """
        self._workers_only(
            "optimizer()", "call cluster.follow(model): an evaluator reads parameters and pushes nothing"
        )
        optimizer, declared = declare_optimizer(
            self._session,
            torch_class,
            model,
            named_arguments(torch_class, positional, arguments),
            name=self._models.free_name(name),
            nonfinite=nonfinite,
            buffers=buffers,
            style=Style(Wire.parse(wire), overlap, choice(Writes, writes, "writes")),
            tables=tables,
            module=module,
            models=self._models,
            clip_grad_norm=clip_grad_norm,
            reconnect_timeout_seconds=self._session.config.reconnect_timeout_seconds,
        )
        self._models.add(declared)
        return optimizer

    def adopt(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        schedulers: Iterable[torch.optim.lr_scheduler.LRScheduler] = (),
        *,
        name: str | None = None,
        nonfinite: str = "refuse",
        buffers: BufferPolicy = "rank0",
        wire: str | None = None,
        overlap: bool = False,
        writes: str = "assign",
        tables: Iterable[torch.nn.Module] = (),
        clip_grad_norm: float | None = None,
    ) -> PsOptimizer:
        """Have the shards run ``optimizer``, one of torch that has been built on parameters of ``model``.

        Returns the same object, whose ``step`` is the cluster's from now on: its groups, their options, its hooks and
        the schedulers built on it stay as they are. Where the job has no values yet, the shards begin with the state
        in the worker of the lowest rank, too. ``schedulers`` are checked to be the optimizer's. Parameters of ``model``
        that are in no group stay this worker's own. The other arguments are those of ``optimizer()``.

        Raises UnsupportedOptimizer for what shards cannot run and for one that was adopted before, InvalidRequest where
        a parameter is not the model's, ConfigError for another optimizer's scheduler, ModelMismatch when workers
        declare different models. The optimizer is then as it was.
        """
        self._workers_only("adopt()", "call cluster.follow(model): an evaluator reads parameters and pushes nothing")
        adopted, declared = adopt_optimizer(
            self._session,
            optimizer,
            model,
            tuple(schedulers),
            name=self._models.free_name(name),
            nonfinite=nonfinite,
            buffers=buffers,
            style=Style(Wire.parse(wire), overlap, choice(Writes, writes, "writes")),
            tables=tables,
            models=self._models,
            clip_grad_norm=clip_grad_norm,
            reconnect_timeout_seconds=self._session.config.reconnect_timeout_seconds,
        )
        self._models.add(declared)
        return adopted

    def prefetch(self, loader: Iterable[T], ids_of: Callable[[T], BatchIds]) -> Prefetch[T]:
        """Iterate over ``loader`` and request the rows of each batch early, of all tables in one message per shard.

        ``ids_of(batch)`` gives the ids by module; for embedding_bags by feature, in a mapping or by its name. The
        module's forward finds its rows by the same tensors, or by the same ids, and looks up other rows itself.

        In async, and in ssp from 1 on, the next batch is taken and its rows requested before this batch is yielded.
        These rows then lack this worker's push of this batch, which the shard includes in the bound. In other modes,
        and for leased data, the rows of a batch are requested when it is yielded.
        """
        return Prefetch(loader, ids_of, self._models.table_modules, lambda: self._session.lookahead)

    @overload
    def shard(
        self, loader: DataLoader[T], *, lease: bool | None = None, name: str | None = None, even: bool = False
    ) -> DataLoader[T]: ...
    @overload
    def shard(
        self, loader: IterableDataset[T], *, lease: bool | None = None, name: str | None = None
    ) -> IterableDataset[T]: ...
    @overload
    def shard(self, loader: Dataset[T], *, lease: bool | None = None, name: str | None = None) -> Dataset[T]: ...
    def shard(self, loader: Any, *, lease: bool | None = None, name: str | None = None, even: bool = False) -> Any:
        """Give this worker's part of a DataLoader, Dataset or IterableDataset, disjoint from the other workers' parts.

        A DataLoader keeps its arguments; its ``batch_size`` stays per worker. Shuffling is common to all workers and
        new in each epoch; each sample is taken exactly once per epoch, none twice, so parts may differ by one sample.
        An evaluator gets everything.

        With ``lease`` the coordinator leases the items of a DataLoader to workers in small ranges. Items that a worker
        has not trained when it leaves or dies go to others, a worker that joins takes part in the present epoch, and a
        restarted job continues where it stopped (docs/data.md). Leases are the default where the number of workers is
        not fixed; iterable datasets, and samplers without a length, are split there by the live workers. Every worker
        leases the same datasets in the same order, or gives each a ``name``; the default is "data", "data-1", … in that
        order.

        With ``even`` every worker gets equally many batches, for code that counts steps: the samples of a last window
        with fewer samples than workers are added to the batches before.

        Raises ConfigError for data that cannot be split, or leased as requested.
        """
        return self._datasets.shard(loader, lease, name, even)

    def barrier(self) -> None:
        """Wait until every live worker has called this, then take the newest parameters and buffers.

        It does not wait for workers that leave or die. Steps of other workers do not wait for a worker in the barrier:
        workers with more data train on until they come too. Raises Fenced.
        """
        self._workers_only("barrier()", "leave it out: workers do not wait for evaluators")
        self._models.meet()

    def all_gather(self, tensor: torch.Tensor, *, name: str = "default", section: int = 0) -> list[torch.Tensor]:
        """The tensors of all workers by rank, 64 KiB each at most. ``Collectives`` tells what calls have in common."""
        return self._collectives.all_gather(tensor, name=name, section=section)

    def all_reduce(
        self, tensor: torch.Tensor, reduction: str = "mean", *, name: str = "default", section: int = 0
    ) -> torch.Tensor:
        """The "mean", "sum", "min" or "max" of a small tensor over the workers; as ``Collectives.all_reduce``."""
        return self._collectives.all_reduce(tensor, reduction, name=name, section=section)

    def broadcast(self, value: Any, source: int = 0, *, name: str = "default") -> Any:
        """The tensor or JSON value of worker ``source``; as ``Collectives.broadcast``."""
        return self._collectives.broadcast(value, source, name=name)

    def gather_values(self, value: Any, *, name: str = "default", section: int = 0) -> dict[int, Any]:
        """Tensors or JSON values of all workers, by rank; as ``Collectives.gather_values``."""
        return self._collectives.gather_values(value, name=name, section=section)

    def report(self, **metrics: float | torch.Tensor) -> None:
        """Show numbers such as ``loss=loss`` with this worker's progress, and in TensorBoard with PS_TENSORBOARD."""
        plain = plain_metrics(metrics)
        self._session.progress.report(plain)
        self._session.instruments.report(plain)

    def follow(self, model: Source, name: str = "model", *, min_interval_seconds: float = 1.0) -> Iterator[int]:
        """Keep ``model`` at the newest parameters: yields the step whenever there are newer ones.

        Waits until a worker has declared the model called ``name``. Ends when the job is finished; the last step
        yielded is the job's last. On a worker, which is itself part of the job, the iteration continues until the loop
        is left; there ``model`` is a separate model, not that of an optimizer. Raises ModelMismatch, naming each
        difference, when ``model`` is another one.
        """
        self._followed = True
        return follow(self._session, model, name, min_interval_seconds)

    def set_mode(
        self,
        mode: str,
        *,
        staleness: int | None = None,
        backup: int = 0,
        grace_seconds: float = 0.0,
        stale_policy: str = "accept",
        stale_threshold: int = 0,
    ) -> None:
        """Change the consistency of the whole job while it runs, as ``set_mode("ssp", staleness=8)``.

        In ssp, ``staleness`` is 4 where it is not given. In sync, ``backup`` pushes of a step may be missing;
        ``grace_seconds`` is how long it waits for these. Raises ConfigError for an unknown mode and InvalidRequest for
        numbers that do not fit the job.
        """
        self._session.set_consistency(
            Consistency.of(
                mode,
                staleness=staleness,
                backup=backup,
                grace_seconds=grace_seconds,
                stale_policy=stale_policy,
                stale_threshold=stale_threshold,
            )
        )

    def scale(
        self,
        *,
        workers: int | None = None,
        shards: int | None = None,
        wait: bool = False,
        timeout_seconds: float | None = None,
        security: SecuritySettings | None = None,
    ) -> str:
        """Have whoever started the job start or end workers and shards, until it has as many; None: as it is.

        Returns what the job waits for, in words, once the coordinator has taken the numbers, which stay wanted. With
        ``wait`` it returns when the job has them. In sync the others cannot finish a step while this worker waits, and
        a worker ends after its step: wait where this worker has no other step to make, or on an evaluator. This worker
        may itself be one that ends. ``security``: the files of an admin, where the job has roles, since a worker may
        not scale it. Raises InvalidRequest for a number that the job cannot have, NotReady where nobody starts and ends
        processes, when another caller scales the job, and after ``timeout_seconds``; PermissionDenied, Unavailable.
        """
        return self._session.scale(ScaleAsk(workers, shards), wait, timeout_seconds, security)

    def close(self) -> None:
        """Leave the job, as the end of a ``with`` block does. Safe to repeat."""
        self._leave("")

    def _warn_of_nothing_done(self) -> None:
        idle = not (self._session.steps or self._datasets.leased or self._followed)
        if idle and self._session.config.role is Role.WORKER:
            warn_of_no_step(self.rank, "step() of its optimizer" if self._models else "optimizer()")

    def _leave(self, reason: str, *, terminated: bool = False) -> None:
        # In this order, also after errors: the last steps, the report of the items they trained, the membership.
        with ExitStack() as ending:
            ending.callback(self._close, reason)
            if self._session.own_process:
                for leases in self._datasets.leased:
                    ending.callback(leases.end)
                if not reason and not self._left:
                    self._models.flush()
                    self._warn_of_nothing_done()
                elif terminated and not self._left:
                    self._session.termination.finish(self._models.finish)
                self._left = True

    def _close(self, reason: str) -> None:
        # First leave: the others continue while streams and channels are closed here.
        self._session.leave(reason)
        try:
            if self._session.own_process:
                self._models.close()
        finally:
            self._session.close()
            if self._embedded is not None:
                self._embedded.close()

    def _workers_only(self, call: str, remedy: str) -> None:
        if self._session.config.role is not Role.WORKER:
            raise ConfigError(f"an evaluator called {call}", expected="worker", actual=self.role, remedy=remedy)
