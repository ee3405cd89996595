"""``Cluster``: what a training script does in its job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ps_protocol.cluster.scaling import ScaleAsk
from ps_protocol.cluster.view import Role
from ps_protocol.errors import ConfigError, InvalidRequest
from ps_protocol.model.spec import Consistency, choice
from ps_protocol.security.settings import SecuritySettings
from ps_protocol.wire.formats import Wire
from ps_worker import files
from ps_worker.collectives import Collectives
from ps_worker.data.datasets import Datasets
from ps_worker.data.files.batches import dataset
from ps_worker.data.files.sources import Paths
from ps_worker.embedded import EmbeddedCluster
from ps_worker.evaluator import follow
from ps_worker.model.bindings import Source
from ps_worker.model.declare import BufferPolicy, named_arguments
from ps_worker.on_shards import adopt_optimizer, declare_optimizer
from ps_worker.optimizer import PsOptimizer
from ps_worker.publishing import Publishing
from ps_worker.session.reporting import plain_metrics
from ps_worker.session.session import Session
from ps_worker.session.terminate import Terminated, leave_reason, warn_of_no_step
from ps_worker.step.remote_model import RemoteModel
from ps_worker.step.summary import StepSettings, Writes
from ps_worker.tables import converted, modules
from ps_worker.tables.prefetch import BatchIds, Prefetch
from ps_worker.trained_models import TrainedModels

T = TypeVar("T")


class Cluster:
    """The connection of a worker or evaluator to its job. Used from one thread, best as ``with connect() as cluster``.

    The end of the ``with`` block leaves the job, so that no other member waits for this one, and hides no exception
    that ended the block. If the coordinator is away then, it is waited for: up to ``reconnect_timeout_seconds`` after a
    clean end, else a few seconds; Ctrl-C ends the wait. SIGTERM ends the block, too, unless the script has a handler of
    its own.
    """

    embedding = staticmethod(modules.embedding)
    embedding_bag = staticmethod(modules.embedding_bag)
    embedding_bags = staticmethod(modules.embedding_bags)
    convert_embeddings = staticmethod(converted.convert_embeddings)

    def __init__(self, session: Session, embedded: EmbeddedCluster | None = None, name: str | None = None) -> None:
        """``embedded``: the servers of this script alone, which end with this object. ``name``: see ``connect``."""
        self._session = session
        self._embedded = embedded
        session.check_own_servers = embedded.check if embedded is not None else session.check_own_servers
        self._models = TrainedModels(session, name or "model")
        self._collectives = Collectives(session, self._models)
        self._publishing = Publishing(session, self._models.keep_open)
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
        """Number of this worker, from 0; of an evaluator, its number among the evaluators."""
        return self._session.rank

    @property
    def world_size(self) -> int:
        """Number of workers of the job; where workers come and go, the number of live workers."""
        view = self._session.view
        return view.expected_workers or len(view.live(Role.WORKER))

    @property
    def device(self) -> torch.device:
        """Device for the model: the ``device`` argument, else ``PS_DEVICE``, else a GPU by rank, else the CPU."""
        return self._session.device

    @property
    def role(self) -> str:
        """Role of this process: "worker" or "evaluator"."""
        return self._session.config.role.value

    @property
    def seed(self) -> int:
        """Seed of the job, the same on every member."""
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
        stale: str | None = None,
        **arguments: Any,
    ) -> PsOptimizer:
        """Place a model on the shards, and return the optimizer that steps it there.

        The shards run ``torch_class(parameters, *positional, **arguments)``. On return the parameters of ``model`` have
        the values of rank 0, or those that the shards have already. Every worker declares the same models in the same
        order.

        The tables of embeddings in ``model`` are part of it, with row optimizers of their own.

        Args:
            torch_class: A class of ``torch.optim``, or one that is registered with ``ps_worker.optimizers.register``.
            model: A module, or anything that a torch optimizer takes: parameters, named parameters, groups.
            *positional: Positional arguments of ``torch_class``, after the parameters.
            name: Name of the model in the job. None: "model", "model-1", … in the order of calls; see ``connect``.
            nonfinite: What to do with NaN and infinite gradients: "refuse", "skip" or "allow".
            buffers: Which buffers the job keeps: "rank0", "average" or "local", for all of them or by name, as in
                ``{"vq": "local"}`` for those of one module and "rank0" for the others.
            wire: Format that makes payloads on a network smaller: "bf16", "fp16", "int8" or "topk:RATIO". Shared memory
                does not use it.
            overlap: Return from ``step`` at once, and exchange with the shards while the next gradients are computed.
                The parameters then lack the last push of this worker, which the bound of ssp includes. In sync and
                ssp(0) ``step`` waits all the same. Not possible with tables; see ``prefetch``.
            writes: What to do with values that the script sets after this call (``load_state_dict``, a clamp,
                ``init``): "assign" makes them the job's from the next step on, and raises an error where updates of
                other workers would be lost; "refuse" always raises an error; "ignore" drops them.
            tables: Modules with tables, where ``model`` is no module.
            module: Module of buffers, tables and names, where ``model`` is no module.
            clip_grad_norm: Norm over the whole model to which the shards clip gradients; in sync, the mean over the
                workers. None: they do not clip.
            stale: What async and ssp do with a gradient by its staleness, the number of updates since its worker
                pulled: "accept" it, "scale" the learning rate of its step by T / staleness above a threshold T, or
                "reject" it above T. T is the number of live workers; "scale:8", "reject:8" give another one. None: as
                the mode of the job says (``set_mode``). Sync has no stale gradients.
            **arguments: Keyword arguments of ``torch_class``.

        Returns:
            An instance of ``torch_class`` whose ``step`` runs on the shards.

        Raises:
            ModelMismatch: Another worker has declared this model differently; the message names each difference.
            UnsupportedOptimizer: Shards cannot run this class or these arguments.
            ConfigError: An option is unknown, or two of them exclude each other.
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
            style=StepSettings(Wire.parse(wire), overlap, choice(Writes, writes, "writes")),
            tables=tables,
            module=module,
            models=self._models,
            clip_grad_norm=clip_grad_norm,
            stale=stale,
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
        stale: str | None = None,
    ) -> PsOptimizer:
        """Have the shards run a torch optimizer that is built already on parameters of ``model``.

        Its groups, their options, its hooks and the schedulers built on it stay as they are. Where the job has no
        values yet, the shards also begin with the optimizer state of the worker of the lowest rank. Parameters of
        ``model`` that are in no group stay this worker's own. After an error the optimizer is as it was.

        Args:
            optimizer: The optimizer.
            model: The module that has its parameters.
            schedulers: Learning-rate schedulers, to be checked: each has to be built on ``optimizer``.
            name: See ``optimizer``.
            nonfinite: See ``optimizer``.
            buffers: See ``optimizer``.
            wire: See ``optimizer``.
            overlap: See ``optimizer``.
            writes: See ``optimizer``.
            tables: See ``optimizer``.
            clip_grad_norm: See ``optimizer``.
            stale: See ``optimizer``.

        Returns:
            The same object, whose ``step`` runs on the shards from now on.

        Raises:
            UnsupportedOptimizer: Shards cannot run it, or it was adopted before.
            InvalidRequest: One of its parameters is not in ``model``.
            ConfigError: A scheduler belongs to another optimizer.
            ModelMismatch: Another worker has declared this model differently.
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
            style=StepSettings(Wire.parse(wire), overlap, choice(Writes, writes, "writes")),
            tables=tables,
            models=self._models,
            clip_grad_norm=clip_grad_norm,
            stale=stale,
            reconnect_timeout_seconds=self._session.config.reconnect_timeout_seconds,
        )
        self._models.add(declared)
        return adopted

    def prefetch(self, loader: Iterable[T], ids_of: Callable[[T], BatchIds]) -> Prefetch[T]:
        """Iterate over ``loader``, and request the rows of each batch early: of all tables in one message per shard.

        The forward pass of a module finds its rows by the same tensors, or by the same ids, and looks up other rows
        itself.

        In async, and in ssp from 1 on, the next batch is taken and its rows are requested before this batch is yielded.
        These rows then lack this worker's push of this batch, which the bound of ssp includes. In other modes, and for
        data that ``shard`` leases, the rows of a batch are requested when it is yielded.

        Args:
            loader: Yields batches.
            ids_of: Returns the ids of a batch by module; for ``embedding_bags`` by feature, in a mapping or by its
                name.

        Returns:
            An iterable of the batches.
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
    @overload
    def shard(
        self, loader: files.FileBatches, *, lease: bool | None = None, name: str | None = None
    ) -> files.FileBatches: ...
    def shard(self, loader: Any, *, lease: bool | None = None, name: str | None = None, even: bool = False) -> Any:
        """Return this worker's part of a DataLoader, Dataset or IterableDataset, or of the batches of ``files.read``,
        disjoint from the parts of other workers.

        A DataLoader keeps its arguments; ``batch_size`` stays per worker. Shuffling is common to all workers and new in
        each epoch. Each sample is taken exactly once per epoch, so parts may differ by one sample. An evaluator gets
        everything.

        With leases, the coordinator leases the items of a DataLoader to workers in small ranges. Items that a worker
        has not trained when it leaves or dies go to others, a worker that joins takes part in the present epoch, and a
        restarted job continues where it stopped. Iterable datasets, and samplers without a length, are then split by
        the live workers. ``shard(files.read(…))`` is ``Cluster.files``.

        Args:
            loader: The data.
            lease: Whether to lease the items. None: where the number of workers is not fixed.
            name: Name of leased data, the same on every worker. None: "data", "data-1", … in the order of calls.
            even: Give every worker equally many batches, for code that counts steps: the samples of a last window with
                fewer samples than workers are added to the batches before.

        Raises:
            ConfigError: The data cannot be split, or leased, as requested.
        """
        return self._datasets.shard(loader, lease, name, even)

    def files(
        self,
        paths: Paths,
        columns: Mapping[str, files.ColumnSpec | str] | Iterable[str] | None = None,
        *,
        batch_size: int,
        shuffle: bool | int = True,
        drop_last: bool = False,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        lease: bool | None = None,
        name: str | None = None,
        on_bad_file: str = "raise",
        format: str | None = None,
        delimiter: str | None = None,
        header: Sequence[str] | None = None,
        quoted_lines: bool = False,
    ) -> files.FileBatches:
        """Read Parquet or text files, and return batches of this worker's part of their rows.

        ``cluster.files("clicks/*.parquet", {"ids": files.ids("user", "ad"), "label": files.floats("clicked")},
        batch_size=1024)``, with ``from ps_worker import files``. Every worker makes the same call. Row groups are
        leased to workers, as the items of ``shard(lease=True)``: each row is trained once in an epoch, and a job that
        begins again goes on in the middle. Rows are read and decoded in a thread beside the loop. An evaluator gets all
        rows.

        Args:
            paths: Files, folders and patterns, as in ``"clicks/**/*.parquet"``. A folder is read with all below it.
                Names of folders as ``day=3`` are columns.
            columns: What a batch has, by name: ``files.ids``, ``files.floats``, ``files.hashed``, or the name of a
                column of numbers. None: all columns.
            batch_size: Rows of a batch.
            shuffle: Mix row groups, and rows within windows of 65,536, or of as many as are given here. False: the
                order of the files.
            drop_last: Leave out rows that do not make a whole batch when this worker has no others.
            transform: Makes of a batch, a dict of tensors, what the loop gets; called in the training thread.
            lease: False: split row groups by rank, in an order that does not depend on who is fast.
            name: Name of the dataset, the same on every worker. None: "data", "data-1", … in the order of calls.
            on_bad_file: "raise" an error for rows that cannot be read, or "skip" them, with a warning in the log.
            format: "parquet" or "csv". None: as the names of the files end.
            delimiter: Of text. None: a tab in .tsv, .tab and .data, else a comma.
            header: Names of the columns of text files whose first line has none.
            quoted_lines: Values of text may have line ends between quotes; then a file is not divided.

        Raises:
            ConfigError: There are no such files, columns or formats, or pyarrow is not installed.
            DamagedData: A file cannot be read, lacks a column, or is not the same on all workers; at an iteration also
                for rows with nulls or other values than are due, and for a file that has changed. The message names
                file, row group and column.
        """
        data = dataset(
            paths,
            columns,
            batch_size,
            seed=self.seed,
            shuffle=shuffle,
            drop_last=drop_last,
            transform=transform,
            on_bad_file=on_bad_file,
            format=format,
            delimiter=delimiter,
            header=header,
            quoted_lines=quoted_lines,
        )
        return self._datasets.files(data, lease, name)

    def barrier(self) -> None:
        """Wait until every live worker has called this, then take the newest parameters and buffers.

        It does not wait for workers that leave or die. Other workers' steps do not wait for a worker in the barrier:
        workers with more data train on until they arrive, too.

        Raises:
            Fenced: This process has lost its place in the job.
        """
        self._workers_only("barrier()", "leave it out: workers do not wait for evaluators")
        self._models.meet()

    def all_gather(self, tensor: torch.Tensor, *, name: str = "default", section: int = 0) -> list[torch.Tensor]:
        """Return the tensors of all workers, by rank: a collective call, as ``gather_values``.

        Args:
            tensor: 64 KiB at most; shapes and dtypes may differ between workers.
            name: See ``gather_values``.
            section: See ``gather_values``.

        Returns:
            The tensors of the workers that took part, on the device of ``tensor``.
        """
        return self._collectives.all_gather(tensor, name=name, section=section)

    def all_reduce(
        self, tensor: torch.Tensor, reduction: str = "mean", *, name: str = "default", section: int = 0
    ) -> torch.Tensor:
        """Reduce a tensor element by element over the workers: a collective call, as ``gather_values``.

        Args:
            tensor: Of one shape and dtype on all workers, 64 KiB at most; for a mean, of a floating-point dtype.
            reduction: "mean", "sum", "min" or "max".
            name: See ``gather_values``.
            section: See ``gather_values``.

        Returns:
            A new tensor, on the device of ``tensor``.

        Raises:
            InvalidRequest: Shapes or dtypes differ between workers.
        """
        return self._collectives.all_reduce(tensor, reduction, name=name, section=section)

    def broadcast(self, value: Any, source: int = 0, *, name: str = "default") -> Any:
        """Return the value of one worker: a collective call, as ``gather_values``.

        Args:
            value: Tensor or JSON value, 64 KiB at most. That of other workers is not sent.
            source: Rank of the worker whose value all get.
            name: See ``gather_values``.

        Returns:
            The value; a tensor is on the CPU.

        Raises:
            InvalidRequest: The worker ``source`` took no part, since it had left or was lost.
        """
        return self._collectives.broadcast(value, source, name=name)

    def gather_values(self, value: Any, *, name: str = "default", section: int = 0) -> dict[int, Any]:
        """Return small tensors or JSON values of all workers, by rank: for metrics, decisions, early stopping.

        All workers make the collective calls – this one, ``all_gather``, ``all_reduce`` and ``broadcast`` – in the same
        order. A call returns when every live worker has made it; it does not wait for workers that leave or die. The
        coordinator carries the values and keeps the results of the last 4096 calls, 8 MiB at most: a worker that was
        started again and runs its script from the beginning gets the results of calls that others have made before.
        While no worker is live, results are forgotten. Each call costs a message to the coordinator and, with a
        journal, a commit there; gradients do not travel this way.

        Args:
            value: Tensor, or what JSON has, 64 KiB at most. None makes the call a barrier.
            name: Calls are matched by name, and by how many of that name a worker has made.
            section: Calls of a name are counted per section. A worker in an earlier section does not wait for one in a
                later section, so a script that begins at a checkpoint names the section where it is.

        Returns:
            The values of the workers that took part, by rank; tensors are on the CPU.

        Raises:
            ConfigError: An evaluator called this, or the value is neither a tensor nor JSON.
            InvalidRequest: The value is too large, another worker made another call, or the result is not kept any
                more.
            Unavailable: The coordinator does not answer in time.
            Fenced: This process has lost its place in the job.
        """
        return self._collectives.gather_values(value, name=name, section=section)

    def report(self, **metrics: float | torch.Tensor) -> None:
        """Show numbers with the progress of this worker, and in TensorBoard with ``PS_TENSORBOARD``.

        Args:
            **metrics: Numbers by name, as in ``report(loss=loss)``; a tensor has one element.
        """
        plain = plain_metrics(metrics)
        self._session.progress.report(plain)
        self._session.instruments.report(plain)

    def follow(self, model: Source, name: str = "model", *, min_interval_seconds: float = 1.0) -> Iterator[int]:
        """Keep ``model`` at the newest parameters, and yield the step whenever there are newer ones.

        Waits until a worker has declared the model. The iteration ends when the job is finished; the last step yielded
        is the last one of the job. On a worker, which is itself part of the job, it continues until the loop is left.

        Args:
            model: A module, or parameters, of the same names and shapes; on a worker, not that of an optimizer.
            name: Name of the model in the job.
            min_interval_seconds: Shortest time between two pulls.

        Yields:
            The number of updates that the parameters contain.

        Raises:
            ModelMismatch: ``model`` is another one; the message names each difference.
        """
        self._followed = True
        return follow(self._session, model, name, min_interval_seconds)

    def publish(
        self,
        name: str,
        source: PsOptimizer | torch.nn.Module | None = None,
        *,
        step: int,
        metadata: Mapping[str, Any] | None = None,
        keep: int = 8,
        wait: bool = False,
    ) -> int:
        """Publish the weights of a model, as all shards have them now, as the next version of a name.

        Readers get it with ``ps_worker.subscribe``: parameters and buffers of one point of the job on all shards, which
        contain at least what this worker has pushed. Shards that keep their state on disk keep versions there, too. One
        worker of a job publishes; others would make versions of their own.

        Args:
            name: What is published, as "policy": letters, digits, ".", "_" and "-".
            source: Optimizer of the model, or the module. None: the only model of this worker.
            step: Number of the training step, for readers; it is not interpreted.
            metadata: More for readers: what JSON has, 16 KiB at most.
            keep: How many versions are kept, 1000 at most, and fewer with much metadata: 4 MB of it in all. Older ones
                are removed, unless they are pinned or being read.
            wait: Return when the version is committed. False: as soon as all shards have taken it, while they write it.
                If it cannot be written after that, there is no such version, and its number goes to the next one. The
                next call of ``publish`` then raises why, and publishes nothing; where a server was lost meanwhile it
                publishes. A clean end of the job raises both.

        Returns:
            The number of the version: 1, 2, 3, …

        Raises:
            InvalidRequest: Name, step, metadata or ``keep`` cannot be, the name belongs to another model, or ``source``
                is a part of a model.
            Unavailable: A shard or the coordinator stays away.
            NotReady: The model has no values yet.
            StorageFull: A shard has no room for it or, without ``wait``, had none for the one before.
            PermissionDenied: This process may not publish.
            Fenced: This process has lost its place in the job.
        """
        self._workers_only("publish()", "a worker publishes; ps_worker.subscribe(name) reads")
        model = self._models.find(source)
        if isinstance(source, torch.nn.Module):
            _check_whole(model, source)
        model.finish()
        return self._publishing.publish(name, model.name, step, metadata, keep, wait=wait)

    def set_mode(
        self,
        mode: str,
        *,
        staleness: int | None = None,
        backup: int = 0,
        grace_seconds: float = 0.0,
        stale_policy: str = "accept",
        stale_threshold: int | str = "workers",
    ) -> None:
        """Change the consistency mode of the whole job while it runs, as ``set_mode("ssp", staleness=8)``.

        It begins at one point of all shards, which are paused for it: each push is decided by the same mode on all.

        Args:
            mode: "async", "ssp" or "sync".
            staleness: ssp: steps by which a worker may be ahead of the slowest. None: 4.
            backup: sync: pushes of a step that may be missing.
            grace_seconds: sync with ``backup``: how long a step waits for these.
            stale_policy: async, ssp: "accept" what is staler than the threshold, "reject" it, or "scale" its learning
                rate by threshold / staleness.
            stale_threshold: Number of updates, or "workers": as many as there are live workers. 1 with "scale" divides
                the learning rate by the staleness.

        Raises:
            ConfigError: Unknown mode or policy, or a value that has no effect in the mode.
            InvalidRequest: The numbers do not fit the job.
            NotReady: A shard stays missing, or a checkpoint or a move takes too long; the mode is as before.
        """
        self._models.keep_open()
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
        """Have the program that started the job start or end workers and shards, until the job has as many.

        In sync the others cannot finish a step while this worker waits, and a worker ends after its step: wait only
        where this worker makes no other step, or on an evaluator. This worker may itself be one that ends.

        Args:
            workers: How many workers the job is to have. None: as many as now.
            shards: How many shards are to hold the models. None: as many as now.
            wait: Return only once the job has them.
            timeout_seconds: How long to wait. None: as long as it takes.
            security: Files of an admin, where the job has roles: a worker may not scale it.

        Returns:
            What the job waits for, in words. The numbers stay wanted from then on.

        Raises:
            InvalidRequest: The job cannot have as many.
            NotReady: Nobody starts and ends processes, another caller scales the job, or the time is over.
            PermissionDenied: This process may not scale the job.
            Unavailable: The coordinator does not answer.
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
                    self._publishing.finish()
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


def _check_whole(model: RemoteModel, source: torch.nn.Module) -> None:
    """Raises InvalidRequest for a module inside the one that ``model`` was declared from: its names are others."""
    names = {id(parameter): name for name, parameter in source.named_parameters()}
    missing = [parameter for parameter in model.parameters if id(parameter) not in names]
    inside = [
        name
        for name, parameter in zip(model.parameter_names, model.parameters, strict=True)
        if name.endswith(f".{names.get(id(parameter), name)}")
    ]
    if missing or inside:
        lacks = f"lacks {len(missing)} of them" if missing else f"is inside it, where they are named '{inside[0]}', …"
        raise InvalidRequest(
            f"a part of model '{model.name}' cannot be published",
            expected=f"the module with all {len(model.parameters)} of its parameters",
            actual=f"a {type(source).__name__} that {lacks}",
            remedy="publish the whole model; readers take what they need from version.tensors()",
        )
