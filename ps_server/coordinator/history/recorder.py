"""Looks at the job once a heartbeat, and keeps what people want to see of it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from ps_protocol.cluster.history import CheckpointFacts, JobHistory, PlacedVariable
from ps_protocol.cluster.view import ClusterStatus, MemberStatus, Role
from ps_protocol.errors import DamagedData
from ps_protocol.logs import EventLogger
from ps_server.coordinator import times
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.history.curve_book import CurveBook
from ps_server.coordinator.history.history_file import HistoryFile, SavedHistory
from ps_server.coordinator.history.placement import placement_of
from ps_server.coordinator.history.rate_window import RateWindow
from ps_server.coordinator.history.sample import sample
from ps_server.glance.alerts import Alert
from ps_server.glance.job import glance_of

logger = EventLogger(__name__)


CHECKPOINTS = 20
"""How many of the last checkpoints are shown."""


class JobRecorder:
    """Runs on the coordinator's event loop; ``history`` is called there."""

    def __init__(
        self,
        driver: Driver,
        configuration: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
        file: HistoryFile | None = None,
    ) -> None:
        """``clock`` gives seconds since 1970; ``configuration`` is shown as it is.

        ``file``: the history goes on from there, and is kept there.
        """
        self._driver = driver
        self._settings = driver.settings
        #: Shown as it is; the owner may add to it.
        self.configuration = dict(configuration or {})
        self._clock = clock
        self._began = clock()
        self._curves = CurveBook(self._settings.heartbeat_seconds)
        #: Shares of waiting, of the last 10 s; growth of tables, of the last minute.
        self._waits: RateWindow[tuple[int, int, str]] = RateWindow(10.0)
        self._rows: RateWindow[tuple[str, str]] = RateWindow(60.0)
        self._checkpoints: deque[CheckpointFacts] = deque(maxlen=CHECKPOINTS)
        #: Epochs of the models, and their placement: it changes seldom, and a model may have many slices.
        self._placed: tuple[Mapping[str, int], tuple[PlacedVariable, ...]] = ({}, ())
        self._alerts: tuple[Alert, ...] = ()
        self._file = file
        self._saved_at = clock()
        self._cannot_save = False
        if file is not None:
            self._restore(file)

    async def run(self) -> None:
        """Look at the job until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._settings.heartbeat_seconds)

    async def look(self) -> None:
        """Take one look, and keep what has been seen once in a while."""
        self.observe()
        if self._clock() - self._saved_at >= times.SAVE_SECONDS:
            await self.save()

    async def save(self) -> None:
        """Keep the history in the file, if there is one. A failure is logged once, until it works again."""
        if self._file is None:
            return
        self._saved_at = self._clock()
        saved = SavedHistory(self._began, self._curves.curves(), self._driver.events.all, tuple(self._checkpoints))
        try:
            await asyncio.to_thread(self._file.write, saved)
            self._cannot_save = False
        except OSError as error:
            if not self._cannot_save:
                logger.warning("history", "the history cannot be kept in %s: %s", self._file.path, error)
            self._cannot_save = True

    def _restore(self, file: HistoryFile) -> None:
        try:
            saved = file.read()
        except (DamagedData, OSError) as error:
            logger.warning("history", "the history in %s is left out, and begins again: %s", file.path, error)
            return
        if saved is not None:
            self._began = min(self._began, saved.began_seconds)
            self._curves.restore(saved.curves)
            self._driver.events.restore(saved.events)
            self._checkpoints.extend(saved.checkpoints)

    def observe(self) -> None:
        """Take one look."""
        now, status = self._clock(), self._driver.status()
        self._curves.add(now, sample(status))
        self._observe_waits(now, status)
        self._observe_tables(now, status)
        self._observe_alerts(glance_of(self._history(status)).alerts)

    def saved(self, folder: str, size_bytes: int, seconds: float, there: Collection[str] = ()) -> None:
        """A checkpoint was written. ``there``: all that its directory holds; others of that directory are forgotten."""
        directory = Path(folder).parent
        kept = [each for each in self._checkpoints if Path(each.folder).parent != directory or each.folder in there]
        self._checkpoints = deque(kept, maxlen=CHECKPOINTS)
        self._checkpoints.append(CheckpointFacts(folder, size_bytes, seconds, self._clock()))

    def history(self) -> JobHistory:
        """The job now, and all that is kept of it."""
        return replace(self._history(self._driver.status()), curves=self._curves.curves())

    def _history(self, status: ClusterStatus) -> JobHistory:
        """Without curves."""
        shares = {
            entry.member.index: {
                reason: min(1.0, self._waits.rate((entry.member.index, entry.member.incarnation, reason)))
                for reason in entry.stats.wait_seconds
            }
            for entry in _live(status, Role.WORKER)
        }
        return JobHistory(
            status=status,
            at_seconds=self._clock(),
            began_seconds=self._began,
            heartbeat_seconds=self._driver.heartbeat_seconds,
            lease_seconds=self._settings.lease_seconds,
            events=self._driver.events.all,
            checkpoints=tuple(self._checkpoints),
            placement=self._placement(),
            wait_shares=shares,
            table_growth={key: self._rows.rate(key) for key in rows_by_table(status)},
            configuration=dict(self.configuration),
        )

    def _placement(self) -> tuple[PlacedVariable, ...]:
        maps = self._driver.shard_maps
        epochs = {name: shard_map.epoch for name, shard_map in maps.items()}
        if epochs != self._placed[0]:
            self._placed = epochs, placement_of(maps.values())
        return self._placed[1]

    def _observe_waits(self, now: float, status: ClusterStatus) -> None:
        keys = set()
        for entry in _live(status, Role.WORKER):
            for reason, seconds in entry.stats.wait_seconds.items():
                key = (entry.member.index, entry.member.incarnation, reason)
                keys.add(key)
                self._waits.take(key, now, seconds)
        self._waits.keep(keys)

    def _observe_tables(self, now: float, status: ClusterStatus) -> None:
        rows = rows_by_table(status)
        for key, count in rows.items():
            self._rows.take(key, now, count)
        self._rows.keep(rows)

    def _observe_alerts(self, found: tuple[Alert, ...]) -> None:
        """An alert that comes or goes is an event."""
        before, now = {alert.key for alert in self._alerts}, {alert.key for alert in found}
        for alert in found:
            if alert.key not in before:
                self._driver.events.add(f"alert: {alert.text}", warning=True)
        for alert in self._alerts:
            if alert.key not in now:
                self._driver.events.add(f"over: {alert.text}")
        self._alerts = found


def rows_by_table(status: ClusterStatus) -> dict[tuple[str, str], int]:
    """Rows of each table over the live shards, by model and table."""
    rows: Counter[tuple[str, str]] = Counter()
    for entry in _live(status, Role.SHARD):
        for counts in entry.stats.tables:
            rows[counts.model, counts.table] += counts.rows
    return dict(rows)


def _live(status: ClusterStatus, role: Role) -> list[MemberStatus]:
    return [entry for entry in status.members if entry.member.role is role and not entry.gone]
