"""Has the lane do what a model decided: every update is logged first, and its memory and room are given back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from copy import copy

import numpy as np

from ps_protocol.errors import PsError
from ps_protocol.tables import Ids
from ps_server.consistency import PushInfo, WorkerKey
from ps_server.failpoints import Failpoints
from ps_server.log import Loaded, RowsDropped, RowsEntry, Update, UpdateLog, apply_rows
from ps_server.optimizers import Region, Replica, StepSkipped, require_counters
from ps_server.shard.combining import Push, combined
from ps_server.shard.live import LiveReplica

AGING_BYTES = 1 << 20
"""More than the record of one lot of rows that go takes."""

KEPT_SKIPPED = 1024
"""Pushes whose step raised that are remembered for their answers; many more than may be unanswered."""


class Applier:
    """Used by one ShardModel, on the shard's event loop.

    There ``failed`` hears of work that may be half done, and ``raised`` of pushes whose step was skipped because it
    raised.
    """

    def __init__(
        self,
        live: LiveReplica,
        log: UpdateLog,
        failpoints: Failpoints,
        failed: Callable[[BaseException], None],
        raised: Callable[[Sequence[PushInfo], StepSkipped], None],
    ) -> None:
        self._live = live
        self._layout = live.layout
        self._log = log
        self._failpoints = failpoints
        self._failed = failed
        self._raised = raised
        #: Pushes whose step raised and was undone, and why: the newest. Written in the lane.
        self.skipped: dict[tuple[WorkerKey, int], StepSkipped] = {}
        #: Loads that wrote something; counted in the lane.
        self.loads = 0

    def update(
        self, pushes: Sequence[Push], version: int, live_workers: int, *, scale: float = 1.0, is_round: bool
    ) -> None:
        """Queue the update that ``pushes``, each reserved for, make together."""
        model = self._layout.shard_map.spec.name

        def work(replica: Replica) -> None:
            infos = tuple(push.info for push in pushes)
            try:
                pool, keep = self._live.pool, self._log.keeps
                with combined(pushes, scale, live_workers, pool, replica.tables, keep=keep) as step:
                    self._make(replica, Update(model, version, infos, is_round, step))
            finally:
                for push in pushes:
                    self.give_memory(push)

        def done(queued: asyncio.Future[Region]) -> None:
            for push in pushes:
                self._log.release(self.nbytes(push))
            self._ended(queued)
            if skipped := self.skipped.get(_name(pushes[0].info)):
                self._raised([push.info for push in pushes], skipped)

        cost = sum(push.rows.cost for push in pushes if push.rows)
        untouched = frozenset.intersection(*(push.absent for push in pushes))
        self._live.change(version, work, cost, untouched=untouched).add_done_callback(done)

    def _make(self, replica: Replica, update: Update) -> None:
        """In the lane. First the log: what is applied has been logged, and what cannot be logged is not applied."""
        self._failpoints.hit("before_log")
        self._log.append(update)
        self._failpoints.hit("after_log_before_apply")
        try:
            replica.apply(update.step)
        except StepSkipped as skipped:
            # Noted before anybody can ask. A new one: the traceback refers to memory that is reused.
            for info in update.pushes:
                self.skipped[_name(info)] = copy(skipped)
            while len(self.skipped) > KEPT_SKIPPED:
                del self.skipped[next(iter(self.skipped))]

    def write_rows(self, entry: RowsEntry, nbytes: int, version: int) -> asyncio.Future[Region]:
        """Queue that rows are written or go, for which ``nbytes`` are reserved; logged first."""

        def work(replica: Replica) -> None:
            self._log.append(entry)
            apply_rows(replica, entry)

        def done(queued: asyncio.Future[Region]) -> None:
            self._log.release(nbytes)
            self._ended(queued)

        written = self._live.change(version, work, nbytes, untouched=None)
        written.add_done_callback(done)
        return written

    async def age(self, table: int, now: float, held: Sequence[Ids], version: int) -> bool:
        """Queue that rows go, but none of ``held``; ``AGING_BYTES`` are reserved. Returns whether any went."""
        went = False

        def work(replica: Replica) -> None:
            nonlocal went
            keep = np.concatenate(held) if held else np.empty(0, np.int64)
            ids, waiting = replica.tables[table].to_drop(now, keep)
            if went := bool(ids.size or waiting.size):
                entry = RowsDropped(self._layout.shard_map.spec.name, table, ids, waiting)
                self._log.append(entry)
                apply_rows(replica, entry)

        def done(queued: asyncio.Future[Region]) -> None:
            self._log.release(AGING_BYTES)
            self._ended(queued)

        aged = self._live.change(version, work, AGING_BYTES, untouched=None)
        aged.add_done_callback(done)
        await asyncio.wait([aged])
        return went

    def load(self, loaded: Loaded, nbytes: int, version: int, slices: Collection[int] = ()) -> asyncio.Future[Region]:
        """Queue that values and state are written, for which ``nbytes`` are reserved, and logged.

        Of the region only ``slices``, where there are any: the others become what they are here then.

        The future holds the PsError that refuses them, if one does; nothing was changed then.
        """
        refusals: list[PsError] = []

        def work(replica: Replica) -> None:
            if slices and loaded.region is not None:
                for begin, end in self._layout.ranges(slices):
                    loaded.region.data[begin:end].copy_(replica.region.data[begin:end])
            try:
                require_counters(replica.layout, loaded.entries or ())
                replica.load(loaded.region, loaded.entries)
            except PsError as refusal:
                refusals.append(refusal)  # the model goes on
                return
            self._log.append(loaded)
            self.loads += 1

        def done(queued: asyncio.Future[Region]) -> None:
            self._log.release(nbytes)
            self._ended(queued)
            if error := refusals[0] if refusals else queued.exception():
                told.set_exception(error)
                told.exception()  # seen: whoever asked for it may be gone
            else:
                told.set_result(queued.result())

        told: asyncio.Future[Region] = asyncio.get_running_loop().create_future()
        self._live.change(version, work).add_done_callback(done)
        return told

    def nbytes(self, push: Push) -> int:
        """What has to be reserved for ``push`` in the log."""
        return self._layout.region_bytes + push.rows_bytes

    def give(self, push: Push) -> None:
        """A push that had been reserved for is done with."""
        self._log.release(self.nbytes(push))
        self.give_memory(push)

    def give_memory(self, push: Push) -> None:
        """Its region is free again."""
        if push.gradients is not None and not push.gradients.lent:
            self._live.pool.give(push.gradients.region)

    def _ended(self, work: asyncio.Future[Region]) -> None:
        if not work.cancelled() and (error := work.exception()):
            self._failed(error)


def _name(info: PushInfo) -> tuple[WorkerKey, int]:
    return info.worker, info.sequence
