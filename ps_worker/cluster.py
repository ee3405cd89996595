"""The face of the SDK: ``connect``, and the ``Cluster`` through which a training script uses parameter servers."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ps_protocol.errors import ConfigError
from ps_protocol.model import Consistency, Mode, StalePolicy
from ps_protocol.view import Role
from ps_protocol.wire import Wire
from ps_worker import data, uncaught
from ps_worker.bindings import Source
from ps_worker.config import WorkerConfig
from ps_worker.declare import choice, named_arguments
from ps_worker.follow import follow
from ps_worker.giving_way import GivingWay, stands_of
from ps_worker.leased_loader import LeasedData, can_lease, leased
from ps_worker.optimizer import PsOptimizer
from ps_worker.progress import log
from ps_worker.session import Session
from ps_worker.stand_in import standing_in
from ps_worker.summary import Style, Writes
from ps_worker.tables.maker import TableMaker
from ps_worker.tables.prefetch import BatchIds, Prefetch
from ps_worker.terminate import TerminationGuard

T = TypeVar("T")

_REASON_CHARACTERS = 200


def connect(
    coordinator: str | None = None,
    *,
    role: str | None = None,
    rank: int | None = None,
    device: str | None = None,
    transport: str | None = None,
    connect_timeout_seconds: float | None = None,
    reconnect_timeout_seconds: float | None = None,
) -> Cluster:
    """Join the cluster as a worker (or evaluator) and wait until it is complete.

    What is not given comes from ``PS_COORDINATOR``, ``PS_ROLE``, ``PS_RANK``, ``PS_DEVICE``, ``PS_TRANSPORT``,
    ``PS_CONNECT_TIMEOUT`` and ``PS_RECONNECT_TIMEOUT``, then from ``TF_CONFIG``. ``ps-run`` sets what its workers need.

    ``transport`` says how steps travel: "shm" (shared memory with shards on this host), "bulk" (TCP sockets beside
    gRPC) or "grpc" alone. Where one cannot be had, the next is taken; "auto", the default, begins with the first.

    Raises ConfigError for settings that are missing or wrong; PlaceTaken when another process has this rank (with
    ``PS_TAKE_OVER=1`` in the environment that one is fenced) or the job has all its workers; InvalidRequest for a rank
    that it does not have; Unavailable when coordinator, shards or other workers are not there within
    ``connect_timeout_seconds`` (default 60). Errors of torch-ps that the script does not catch
    are shown without torch-ps's own frames; ``PS_TRACEBACK=full`` shows all.
    """
    uncaught.install()
    config = WorkerConfig.from_environment(
        os.environ,
        coordinator=coordinator,
        role=role,
        rank=rank,
        device=device,
        transport=transport,
        connect_timeout_seconds=connect_timeout_seconds,
        reconnect_timeout_seconds=reconnect_timeout_seconds,
    )
    return Cluster(Session.join(config))


class Cluster(TableMaker):
    """A worker's or evaluator's connection to its job. Used from one thread, best as ``with connect() as cluster``.

    At the end of the ``with`` block it leaves the job, so that nobody waits for it, within seconds and without hiding
    the exception that ended the block; SIGTERM ends the block too, where the script has no handler of its own.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._optimizers: dict[str, PsOptimizer] = {}
        #: Sharding the same loader again goes on with its name, and the same name with its epochs.
        self._names: weakref.WeakKeyDictionary[DataLoader[Any], str] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._epochs: dict[str, Iterator[int]] = {}
        #: Datasets of which leases may be held.
        self._leased: weakref.WeakSet[LeasedData] = weakref.WeakSet()
        #: With several models.
        self._giving_way: GivingWay | None = None
        self._guard = TerminationGuard()
        self._left = False
        #: It reads a model, as a worker may do beside others.
        self._followed = False

    def __enter__(self) -> Self:
        self._guard.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._leave(_reason(error))
        finally:
            self._guard.remove()

    def __repr__(self) -> str:
        return f"Cluster({self.role} {self.rank} of {self.world_size}, coordinator {self._session.config.coordinator})"

    @property
    def rank(self) -> int:
        """Number of this worker, from 0; an evaluator's number among evaluators."""
        return self._session.rank

    @property
    def world_size(self) -> int:
        """Workers of the job; in an elastic job those that live now."""
        view = self._session.view
        return view.expected_workers or len(view.live(Role.WORKER))

    @property
    def device(self) -> torch.device:
        """Where to put the model: the ``device`` argument, else ``PS_DEVICE``, else a GPU by rank, else the CPU."""
        return self._session.device

    @property
    def role(self) -> str:
        """What this process is: "worker" or "evaluator"."""
        return self._session.config.role.value

    @property
    def seed(self) -> int:
        """The job's seed, the same on every member."""
        return self._session.share.seed

    def optimizer(
        self,
        torch_class: type[torch.optim.Optimizer],
        model: Source,
        *positional: Any,
        name: str | None = None,
        nonfinite: str = "refuse",
        buffers: str = "rank0",
        wire: str | None = None,
        overlap: bool = False,
        writes: str = "assign",
        tables: Iterable[torch.nn.Module] = (),
        module: torch.nn.Module | None = None,
        **arguments: Any,
    ) -> PsOptimizer:
        """Give ``model`` to the shards, which run ``torch_class(…, *positional, **arguments)`` on it.

        ``model`` is a module or whatever torch.optim takes; where it is parameters or groups, ``module`` says whose
        buffers and tables belong to it, and what its variables are called. Its values are rank 0's (or those the shards
        hold already) on return. Every worker calls this for the same models in the same order; ``name`` defaults to
        "model", "model-1", … by that order. ``nonfinite`` says what happens to NaN and infinite gradients: "refuse",
        "skip" or "allow"; ``buffers`` whose buffers are kept: "rank0", "average" or "local".

        ``wire`` makes payloads smaller where they travel through a network: "bf16", "fp16", "int8" or "topk:RATIO"
        (docs/codecs.md); over shared memory it is not used. With ``overlap`` a step returns at once, and the exchange
        with the shards goes on while the next gradients are computed: parameters then lack this worker's own last
        push, which ssp bounds count in. In sync, and in ssp(0), ``step`` waits as without it.

        The tables of embeddings in ``model`` are part of it, with row optimizers of their own; where ``model`` is no
        module, those are found in ``module`` and the modules ``tables``. ``overlap`` is not possible with tables; see
        ``prefetch``.

        ``writes`` says what becomes of values that are set after this call (``load_state_dict``, clamps, ``init``):
        with "assign" they are the cluster's from the next step on, and an error where others' updates would be lost
        with them; "refuse" makes all of them errors, "ignore" drops them (docs/guarantees.md).

        Raises ModelMismatch when workers declare different models, UnsupportedOptimizer for what shards cannot run.
        """
        self._workers_only(
            "optimizer()", "call cluster.follow(model): an evaluator reads parameters and pushes nothing"
        )
        count = len(self._optimizers)
        chosen = name or (f"model-{count}" if count else "model")
        if chosen in self._optimizers:
            raise ConfigError(f"this worker has an optimizer named '{chosen}' already", remedy="give each its own name")
        optimizer = PsOptimizer.declare(
            self._session,
            torch_class,
            model,
            named_arguments(torch_class, positional, arguments),
            name=chosen,
            nonfinite=nonfinite,
            buffers=buffers,
            style=Style(Wire.parse(wire), overlap, choice(Writes, writes, "writes")),
            tables=tables,
            module=module,
            held={id(p): other for other, optimizer in self._optimizers.items() for p in optimizer.trained_parameters},
            reconnect_timeout_seconds=self._session.config.reconnect_timeout_seconds,
        )
        self._optimizers[chosen] = optimizer
        self._keep_in_step()
        return optimizer

    def prefetch(self, loader: Iterable[T], ids_of: Callable[[T], BatchIds]) -> Prefetch[T]:
        """Iterate over ``loader`` with the rows of each batch asked for early, of all tables in one message per shard.

        ``ids_of(batch)`` gives the ids by module, for embedding_bags by feature in a mapping or by its name; the
        module's forward finds its rows by the same tensors, or by the same ids. What is not found is looked up there.

        In async, and in ssp from 1 on, the next batch is taken and asked for before this one is given out: the rows
        then lack this worker's own push between, which the shard counts in the bound. In other modes, and for data
        that is leased, a batch's rows are asked for when it is given out.
        """
        return Prefetch(
            loader,
            ids_of,
            lambda: [module for optimizer in self._optimizers.values() for module in optimizer.table_modules],
            lambda: self._session.lookahead,
        )

    @overload
    def shard(self, loader: DataLoader[T], *, lease: bool | None = None, name: str | None = None) -> DataLoader[T]: ...
    @overload
    def shard(
        self, loader: IterableDataset[T], *, lease: bool | None = None, name: str | None = None
    ) -> IterableDataset[T]: ...
    @overload
    def shard(self, loader: Dataset[T], *, lease: bool | None = None, name: str | None = None) -> Dataset[T]: ...
    def shard(self, loader: Any, *, lease: bool | None = None, name: str | None = None) -> Any:
        """Give this worker's part of a DataLoader, Dataset or IterableDataset, disjoint from the other workers' parts.

        A DataLoader keeps its arguments; its ``batch_size`` stays per worker. Shuffling is common to all workers and
        new in each epoch; each sample is taken exactly once per epoch, none twice, so parts may differ by one sample.
        An evaluator gets everything.

        With ``lease`` the coordinator hands out the items of a DataLoader bit by bit: what a worker that leaves or dies
        has not trained goes to others, one that joins takes part in the epoch under way, and a restarted job goes on
        where it stopped (docs/data.md). That is the default where the number of workers is not fixed; iterable
        datasets, and samplers without a length, are split there by the workers that live now. Every worker leases the
        same datasets in the same order, or gives each a ``name``; the default is "data", "data-1", … by that order.

        Raises ConfigError for what cannot be split, or not be leased as asked.
        """
        name = self._dataset_name(loader, name)
        epochs = self._epochs.setdefault(name, itertools.count()) if name else itertools.count()
        record = self._session.progress.record_samples
        if lease and not can_lease(loader):
            raise ConfigError(
                "shard() cannot lease this",
                expected="a DataLoader of a dataset and a sampler with a length",
                actual=type(loader).__name__,
                remedy="leave lease=True out: it is split among the workers that live when shard() is called",
            )
        if self._session.config.role is Role.WORKER and (
            lease or (lease is None and self._session.elastic and can_lease(loader))
        ):
            loader = leased(loader, name, self._session, epochs, record, self._idle)
            self._leased.add(loader.leases)
            return loader
        return data.shard(loader, self._session.share, epochs, record)

    def barrier(self) -> None:
        """Wait until every live worker has come here, then take the newest parameters and buffers.

        A worker that leaves or dies is not waited for. One that waits here holds nobody back: those with more data
        train on until they come too. Raises Fenced.
        """
        self._workers_only("barrier()", "leave it out: workers do not wait for evaluators")
        self._session.pass_barrier(self._announce_arrival)
        for optimizer in self._optimizers.values():
            optimizer.pull()

    def report(self, **metrics: float | torch.Tensor) -> None:
        """Show numbers such as ``loss=loss`` with this worker's progress. A tensor is read once a second at most."""
        plain: dict[str, float | torch.Tensor] = {}
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                plain[name] = value.detach()
            elif isinstance(value, int | float):
                plain[name] = float(value)
            else:
                raise ConfigError(
                    f"report() cannot show '{name}'",
                    expected="a number or a tensor of one element",
                    actual=repr(value)[:80],
                )
        self._session.progress.report(plain)

    def follow(self, model: Source, name: str = "model", *, min_interval_seconds: float = 1.0) -> Iterator[int]:
        """Keep ``model`` at the newest parameters: yields the step whenever they have moved.

        Waits until a worker has declared the model called ``name``. Ends when the job is finished; the last step
        yielded is the last there is. On a worker, which is itself part of the job, it goes on until the loop is left;
        there ``model`` is one of its own, not the one an optimizer holds. Raises ModelMismatch, naming each difference,
        when ``model`` is another one.
        """
        self._followed = True
        return follow(self._session, model, name, min_interval_seconds)

    def set_mode(
        self,
        mode: str,
        *,
        staleness: int = 0,
        backup: int = 0,
        grace_seconds: float = 0.0,
        stale_policy: str = "accept",
        stale_threshold: int = 0,
    ) -> None:
        """Change the consistency of the whole job while it runs, as ``set_mode("ssp", staleness=4)``.

        In sync, ``backup`` pushes of a step may be missing; ``grace_seconds`` is how long it waits for these.
        Raises ConfigError for an unknown mode and InvalidRequest for numbers that do not fit the job.
        """
        policy = choice(StalePolicy, stale_policy, "stale_policy")
        chosen = choice(Mode, mode, "mode")
        self._session.set_consistency(Consistency(chosen, staleness, backup, policy, stale_threshold, grace_seconds))

    def close(self) -> None:
        """Leave the job, as the end of a ``with`` block does. Safe to repeat."""
        self._leave("")

    def _dataset_name(self, loader: object, name: str | None) -> str:
        if not isinstance(loader, DataLoader):
            return ""
        if loader not in self._names or name:
            number = next(self._numbers) if name is None else 0
            self._names[loader] = name or (f"data-{number}" if number else "data")
        return self._names[loader]

    def _keep_in_step(self) -> None:
        """With several models, let none of their steps wait in a circle with those of other workers."""
        if len(self._optimizers) < 2:
            return
        if self._giving_way is None:
            self._giving_way = GivingWay(
                self.rank,
                lambda: list(self._optimizers.values()),
                partial(stands_of, self._session),
                lambda: self._session.view.consistency,
            )
        for optimizer in self._optimizers.values():
            optimizer.around = partial(self._giving_way.waiting, optimizer)

    def _idle(self) -> AbstractContextManager[None]:
        """While this worker waits for data, others do not wait for its steps."""
        return standing_in(
            list(self._optimizers.values()), lambda: self._session.view.consistency.mode is not Mode.ASYNC
        )

    def _warn_of_nothing_done(self) -> None:
        """A worker that did nothing was not meant to, as far as can be told: leased data may all be with others."""
        if self._session.config.role is not Role.WORKER or self._session.steps or self._leased or self._followed:
            return
        call = "step() of its optimizer" if self._optimizers else "optimizer()"
        log.warning(
            "%s %d leaves without a step: the script never called %s, and its parameters are as they were",
            self.role,
            self.rank,
            call,
        )

    def _leave(self, reason: str) -> None:
        # In this order, whatever fails: the last steps, a report of the items they trained, the membership.
        with ExitStack() as ending:
            ending.callback(self._close, reason)
            if self._session.own_process:
                for leases in self._leased:
                    ending.callback(leases.end)
                for optimizer in self._optimizers.values() if not reason and not self._left else ():
                    optimizer.settle()
                if not reason and not self._left:
                    self._warn_of_nothing_done()
                self._left = True

    def _close(self, reason: str) -> None:
        # Leaving comes first: the others go on while streams and channels are closed here.
        self._session.leave(reason)
        try:
            if self._session.own_process:
                if self._giving_way:
                    self._giving_way.close()
                for optimizer in self._optimizers.values():
                    optimizer.close()
        finally:
            self._session.close()

    def _announce_arrival(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.arrive(self._session.phase)

    def _workers_only(self, call: str, remedy: str) -> None:
        if self._session.config.role is not Role.WORKER:
            raise ConfigError(f"an evaluator called {call}", expected="worker", actual=self.role, remedy=remedy)


def _reason(error: BaseException | None) -> str:
    """Why a worker leaves, empty at a clean end."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return ""
    return f"{type(error).__name__}: {error}".removesuffix(": ")[:_REASON_CHARACTERS]
