"""What an operator does to a running job, as blocking calls: psctl and ``ps_worker.admin`` are both made of these."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from ps_protocol import times
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.client.coordinator_streams import MoveStream
from ps_protocol.client.model_status import (
    ModelRates,
    TableTotals,
    learning_rates_of,
    shard_maps,
    statuses_of,
    table_totals,
)
from ps_protocol.cluster.history import CheckpointFacts, JobHistory
from ps_protocol.cluster.job_state import FINISHED, TRAINING, headline, job_state
from ps_protocol.cluster.scaling import ScaleAsk, ScaleProgress
from ps_protocol.cluster.view import ClusterStatus, Divergence, MoveProgress, Role
from ps_protocol.cluster.weights import WeightsState
from ps_protocol.errors import InvalidRequest, NotReady, Unavailable, UnknownModel
from ps_protocol.feed.cursor import Cursor
from ps_protocol.feed.reader import Change, Following, TableFeed
from ps_protocol.model.spec import Consistency

if TYPE_CHECKING:
    from ps_protocol.client.row_loader import RowLoader


_WORKERS = re.compile(r"(\d+)-workers?")


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """A checkpoint of the whole job."""

    #: Path of its folder, as the coordinator sees it.
    folder: str
    size_bytes: int
    #: How long it took to write.
    seconds: float


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """A checkpoint whose values the running job has taken over."""

    folder: str
    #: Names of the models that were restored.
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MoveSummary:
    """What a move of slices has done."""

    moved_bytes: int
    #: Batches; training paused once for each.
    batches: int
    longest_pause_seconds: float


@dataclass(frozen=True, slots=True)
class JobSize:
    """The number of live workers, and of shards that have parts of models."""

    workers: int
    shards: int


class AwaitedState:
    """A state of a job to wait for: "training", "finished", or a number of live workers such as "4-workers"."""

    def __init__(self, name: str) -> None:
        """Raises InvalidRequest for a name that is no state."""
        self.name = name
        found = _WORKERS.fullmatch(name)
        self._workers = int(found[1]) if found else None
        if not found and name not in (TRAINING, FINISHED):
            raise InvalidRequest(
                f"{name!r} is not a state: use finished, training, or a number of workers such as 4-workers"
            )

    def reached(self, status: ClusterStatus) -> bool:
        """Whether a job with this ``status`` is in the state, or has at least so many workers."""
        if self._workers is not None:
            return len(status.view.live(Role.WORKER)) >= self._workers
        return job_state(status).name == self.name


class AdminClient:
    """Inspects and changes a running job. Any thread may call it; every call blocks.

    Best used as ``with ps_worker.admin.connect("host:7000") as job``. Calls that may be repeated, such as ``status``,
    are repeated for 10 s while the coordinator does not answer. Where the job has roles, calls that change it need a
    token or certificate of an admin. Every call may raise Unavailable, Unauthenticated and PermissionDenied; each
    documents its other errors.
    """

    def __init__(self, client: CoordinatorClient) -> None:
        """Takes over ``client``, and closes it with itself."""
        self._client = client

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Address of the coordinator, host:port."""
        return self._client.address

    def close(self) -> None:
        """Close the connection; calls in progress raise Unavailable."""
        self._client.close()

    def connect(self, timeout_seconds: float = times.CONNECT_SECONDS) -> None:
        """Return once the coordinator answers.

        Args:
            timeout_seconds: How long to wait for an address that does not answer.

        Raises:
            Unavailable: With the reason: at once for an unknown host and for a port where nothing listens.
            Unauthenticated: The coordinator wants TLS or a token.
        """
        self._client.connect(timeout_seconds)

    def status(self) -> ClusterStatus:
        """Return the job as it is: its members with their last statistics, mode, models and decisions.

        ``job_state`` and ``ailments`` say in words in what state it is and what is wrong.
        """
        return self._client.get_status()

    def history(self, *, last_points: int = 0) -> JobHistory:
        """Return the status with curves, events, checkpoints, placement and configuration.

        Args:
            last_points: How many points of each curve to return. 0: all.
        """
        return self._client.get_history(last_points=last_points)

    def checkpoints(self) -> tuple[CheckpointFacts, ...]:
        """Return the checkpoints that this coordinator has written, oldest first."""
        return self.history(last_points=1).checkpoints

    def tables(self, status: ClusterStatus | None = None) -> tuple[TableTotals, ...]:
        """Return rows and bytes of every table, by model, summed over the shards that answer within a second.

        Args:
            status: A status that was just taken, to spare a call. None: ask for one.
        """
        return table_totals(self._client, (status or self.status()).view)

    def learning_rates(self, model: str | None = None) -> tuple[ModelRates, ...]:
        """Return the learning rates of the last step, by model.

        Args:
            model: Name of the only model to return. None: all.

        Raises:
            UnknownModel: The job has no such model.
            Unavailable: No shard of a model answers.
        """
        view = self.status().view
        maps = [each for each in shard_maps(self._client, view) if model in (None, each.spec.name)]
        if model is not None and not maps:
            raise UnknownModel(f"the job has no model '{model}'", expected=", ".join(sorted(view.models)), actual=model)
        answers = statuses_of(self._client, maps, view)
        silent = [each.spec.name for each in maps if each.spec.name not in answers]
        if silent:
            raise Unavailable(f"no shard of model '{silent[0]}' answers", remedy="see psctl status")
        return tuple(learning_rates_of(name, statuses) for name, statuses in sorted(answers.items()))

    def set_mode(
        self,
        mode: str,
        *,
        staleness: int | None = None,
        backup: int = 0,
        grace_seconds: float = 0.0,
        stale_policy: str = "accept",
        stale_threshold: int | str = "workers",
    ) -> Consistency:
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

        Returns:
            The mode in force.

        Raises:
            ConfigError: Unknown mode or policy, or a value that has no effect in the mode.
            InvalidRequest: The numbers do not fit the job.
            NotReady: A shard is missing, or a checkpoint or a move takes more than a minute; the mode is as before.
        """
        return self.set_consistency(
            Consistency.of(
                mode,
                staleness=staleness,
                backup=backup,
                grace_seconds=grace_seconds,
                stale_policy=stale_policy,
                stale_threshold=stale_threshold,
            )
        )

    def set_consistency(self, consistency: Consistency) -> Consistency:
        """As ``set_mode``, with the settings in one object."""
        return self._client.set_consistency(consistency).consistency

    def checkpoint(self) -> WrittenCheckpoint:
        """Write a checkpoint of the whole job while it trains. Return once it is complete, within an hour.

        Raises:
            InvalidRequest: The coordinator has no folder for checkpoints.
            NotReady: The job is not complete, or another checkpoint is being written.
            StorageFull: A disk is full.
        """
        return WrittenCheckpoint(*self._client.checkpoint())

    def restore(self, folder: str = "", step: int | None = None) -> RestoredCheckpoint:
        """Restore a checkpoint into the running job, while it trains. Return once all shards have it.

        Values and optimizer state of its models are replaced on all shards at once; versions and clocks do not go back.

        Args:
            folder: Path of the checkpoint, which has to be the same for the servers. Empty: the newest one.
            step: In place of a folder, the step of a checkpoint in the coordinator's directory: the number of updates
                that its models had.

        Raises:
            InvalidRequest: There is no such checkpoint.
            ModelMismatch: It does not fit the models of the job.
            DamagedData: A file of it is damaged.
            NotReady: The job is not complete.
        """
        found, models = self._client.restore_checkpoint(str(Path(folder).absolute()) if folder else "", step)
        return RestoredCheckpoint(found, tuple(models))

    def release(self, model: str) -> int:
        """Drop a model on all shards: its values, optimizer state and tables.

        Returns:
            Bytes of the values of its variables.

        Raises:
            NotReady: Workers still use it; the message names them.
            UnknownModel: The job has no such model.
            ModelReleased: It was released before.
        """
        return self._client.release_model(model)

    def acknowledge_divergence(self) -> tuple[Divergence, ...]:
        """Take the numbers that have grown far above their history for usual: the job is not reported as diverging any
        more, unless they grow again.

        Returns:
            What was reported until now, as in ``status().divergences``.
        """
        return self._client.acknowledge_divergence()

    def weights(self) -> tuple[WeightsState, ...]:
        """Return what the job publishes: by name, the versions that are kept, those that are gone, readers and pins."""
        return self._client.get_weights()

    def pin_weights(self, name: str, number: int, *, seconds: float = 3600.0, holder: str = "operator") -> None:
        """Keep a published version although newer ones come.

        Args:
            name: What is published.
            number: Number of the version.
            seconds: For how long, from now: 30 days at most. 0: no longer.
            holder: Who wants it; a later pin of the same holder and version replaces this one.

        Raises:
            UnknownVersion: There has been no such version.
            VersionGone: It was removed.
            InvalidRequest: The time cannot be.
        """
        self._client.pin_weights(name, number, holder, seconds)

    def move(
        self,
        to: Collection[int] = (),
        *,
        model: str = "",
        variable: str = "",
        batch_bytes: int = 0,
        on_progress: Callable[[MoveProgress], None] | None = None,
    ) -> MoveSummary:
        """Move slices and tables between shards while the job trains. Return once all is moved.

        When the call is interrupted, the current batch is completed or undone, and what was moved stays moved.

        Args:
            to: Shards that receive their share. Empty: balance the shards that hold something now.
            model: Model of ``variable``.
            variable: Move only this variable or table, to the one shard in ``to``.
            batch_bytes: Bytes that move in one pause of training. 0: what a pause of 0.12 s allows.
            on_progress: Called at the start and after each batch.

        Raises:
            UnknownShard: A shard of ``to`` is not there.
            UnknownModel: The job has no such model.
            InvalidRequest: The model has no such variable, or the arguments do not go together.
            NotReady: Another move is under way, or members are missing.
            StorageFull: A disk is full.
        """
        _check_counts("move()", *to, batch_bytes)
        return _followed(self._client.move(to, (), model, variable, batch_bytes), on_progress)

    def drain(
        self,
        shards: Collection[int],
        *,
        to: Collection[int] = (),
        batch_bytes: int = 0,
        on_progress: Callable[[MoveProgress], None] | None = None,
    ) -> MoveSummary:
        """Move everything off some shards while the job trains, so that they can be stopped.

        Args:
            shards: Shards that are to hold nothing.
            to: Shards that are used from now on, beside those that hold something.
            batch_bytes: As for ``move``.
            on_progress: As for ``move``.

        Raises:
            UnknownShard: A shard is not there.
            InvalidRequest: No shard is named, or none would be left.
            NotReady: Another move is under way, or members are missing.
            StorageFull: A disk is full.
        """
        if not shards:
            raise InvalidRequest("drain() names no shard", remedy="move() balances all shards")
        _check_counts("drain()", *shards, *to, batch_bytes)
        return _followed(self._client.move(to, shards, batch_bytes=batch_bytes), on_progress)

    def scale(
        self,
        *,
        workers: int | None = None,
        shards: int | None = None,
        timeout_seconds: float | None = None,
        on_progress: Callable[[ScaleProgress], None] | None = None,
    ) -> JobSize:
        """Have the program that started the job start or end workers and shards. Return once the job has as many.

        The numbers stay wanted when the call ends early.

        Args:
            workers: How many workers the job is to have. None: as many as now.
            shards: How many shards are to hold the models. None: as many as now.
            timeout_seconds: How long to wait. None: as long as it takes.
            on_progress: Called when what the job waits for changes, and at last with ``done``.

        Raises:
            InvalidRequest: The job cannot have as many.
            NotReady: Nobody starts and ends processes, another caller scales the job, or the time is over.
        """
        for progress in self._client.scale(ScaleAsk(workers, shards), timeout_seconds):
            if on_progress is not None:
                on_progress(progress)
        view = self.status().view
        return JobSize(len(view.live(Role.WORKER)), len(view.used_shards))

    def wait(
        self,
        state: str,
        timeout_seconds: float | None = None,
        on_wait: Callable[[str], None] = lambda text: None,
    ) -> ClusterStatus:
        """Return the status of the job once it is in a state. A coordinator that does not answer is waited for, too.

        Args:
            state: "training": every expected member has joined, and none that training needs is lost; "finished"; or a
                number of live workers, such as "4-workers".
            timeout_seconds: How long to wait. None: as long as it takes.
            on_wait: Called every few seconds while the coordinator does not answer, with what is waited for.

        Raises:
            InvalidRequest: There is no such state.
            NotReady: The job is not in this state in time, or has finished in another one.
            Unavailable: The coordinator does not answer in time.
        """
        awaited = AwaitedState(state)
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            seen = self._first_answer(deadline, on_wait)
            if awaited.reached(seen):
                return seen
            over = time.monotonic() >= deadline
            if over or seen.view.finished:
                why = f"after {timeout_seconds:g} s" if over else "and the job has finished"
                raise NotReady(f"not '{state}' {why}: {headline(seen)}")
            time.sleep(0.5)

    def _first_answer(self, deadline: float, on_wait: Callable[[str], None]) -> ClusterStatus:
        """The status, once the coordinator answers. Raises Unavailable after ``deadline``."""
        while True:
            try:
                return self._client.get_status(once=True)
            except Unavailable:
                left = deadline - time.monotonic()
            if left > 0:
                self._client.wait_until_reachable(left, on_wait)
            else:
                self._client.connect()  # raises the reason

    def feed(
        self,
        table: str,
        model: str = "model",
        cursor: Cursor | None = None,
        *,
        with_state: bool = False,
        follow: bool = True,
        on_wait: Callable[[str], None] = lambda text: None,
    ) -> Iterator[Change]:
        """Yield the changes of a table: see ``ps_worker.feed.follow_table``.

        Args:
            table: Name of the table.
            model: Name of its model.
            cursor: Position to continue from. None: from the beginning.
            with_state: Append the state of the row optimizer to the values of each row.
            follow: Keep following until the job ends. False: end once every present row was sent.
            on_wait: Called with what the reader waits for, from any thread.

        Yields:
            The changes, each of one shard.

        Raises:
            UnknownModel: The job has no such model.
            InvalidRequest: The model has no such table, or ``cursor`` is of another table.
        """
        yield from TableFeed(self._client, Following(table, model, with_state, follow), cursor, on_wait)

    def load_rows(
        self,
        table: str,
        ids: npt.ArrayLike,
        values: npt.ArrayLike,
        *,
        model: str = "model",
        only_new: bool = False,
    ) -> int:
        """Write rows to a table while the job trains, each to the shard of its bucket.

        Rows that were written remain when the call fails; call it again to continue.

        Args:
            table: Name of the table.
            ids: int64 [n]; of rows with the same id the last one counts.
            values: float32 [n, dim], or [n, width] with the state of the row optimizer after the values. Without state,
                rows get initial state.
            model: Name of its model.
            only_new: Leave existing rows as they are.

        Returns:
            The number of rows written.

        Raises:
            UnknownModel: The job has no such model.
            InvalidRequest: The model has no such table, shapes or dtypes do not fit, or a value is NaN or infinite.
            StorageFull: A disk stays full for a minute.
        """
        id_array, value_array = np.asarray(ids), np.asarray(values)
        with self.row_loader(table, model) as loader:
            loader.check(id_array, value_array)
            for begin in range(0, id_array.size, loader.piece_rows):
                piece = slice(begin, begin + loader.piece_rows)
                loader.write(id_array[piece], value_array[piece], only_new=only_new)
        return int(id_array.size)

    @contextmanager
    def row_loader(self, table: str, model: str = "model") -> Iterator[RowLoader]:
        """A writer of many pieces to one table; the job counts it as an evaluator until the block ends."""
        from ps_protocol.client.row_loader import RowLoader  # Compiled code: not for other calls.

        with ExitStack() as exits:
            yield RowLoader(self._client, model, table, exits)


def _followed(stream: MoveStream, on_progress: Callable[[MoveProgress], None] | None) -> MoveSummary:
    last, longest = MoveProgress(), 0.0
    try:
        for last in stream:
            longest = max(longest, last.pause_seconds)
            if on_progress is not None:
                on_progress(last)
    finally:
        stream.cancel()
    return MoveSummary(last.moved_bytes, last.batches, longest)


def _check_counts(call: str, *numbers: int) -> None:
    for number in numbers:
        if number < 0:
            raise InvalidRequest(f"{call} has a negative number", expected="numbers from 0", actual=str(number))
