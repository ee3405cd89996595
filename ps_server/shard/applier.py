"""Has the lane do what a model decided: every update is logged first, and its memory and room are given back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ps_protocol.errors import PsError
from ps_server.failpoints import Failpoints
from ps_server.log import Loaded, Update, UpdateLog
from ps_server.optimizers import Region, Replica
from ps_server.shard.combining import Push, combined
from ps_server.shard.live import LiveReplica


class Applier:
    """Used by one ShardModel, on the shard's event loop. ``failed`` hears there of work that may be half done."""

    def __init__(
        self, live: LiveReplica, log: UpdateLog, failpoints: Failpoints, failed: Callable[[BaseException], None]
    ) -> None:
        self._live = live
        self._layout = live.layout
        self._log = log
        self._failpoints = failpoints
        self._failed = failed
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
                with combined(pushes, scale, live_workers, self._live.pool) as step:
                    self._make(replica, Update(model, version, infos, is_round, step))
            finally:
                for push in pushes:
                    self.give_memory(push)

        def done(queued: asyncio.Future[Region]) -> None:
            for _ in pushes:
                self._log.release(self._layout.region_bytes)
            self._ended(queued)

        self._live.change(version, work).add_done_callback(done)

    def _make(self, replica: Replica, update: Update) -> None:
        """In the lane. First the log: what is applied has been logged, and what cannot be logged is not applied."""
        self._failpoints.hit("before_log")
        self._log.append(update)
        self._failpoints.hit("after_log_before_apply")
        replica.apply(update.step)

    def load(self, loaded: Loaded, nbytes: int, version: int) -> asyncio.Future[Region]:
        """Queue that values and state are written, for which ``nbytes`` are reserved, and logged.

        The future holds the PsError that refuses them, if one does; nothing was changed then.
        """
        refusals: list[PsError] = []

        def work(replica: Replica) -> None:
            try:
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

    def give(self, push: Push) -> None:
        """A push that had been reserved for is done with."""
        self._log.release(self._layout.region_bytes)
        self.give_memory(push)

    def give_memory(self, push: Push) -> None:
        """Its region is free again."""
        if push.gradients is not None and not push.gradients.lent:
            self._live.pool.give(push.gradients.region)

    def _ended(self, work: asyncio.Future[Region]) -> None:
        if not work.cancelled() and (error := work.exception()):
            self._failed(error)
