"""Observes the job once a heartbeat, and keeps its history for people."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

from ps_protocol.cluster.history import CheckpointFacts, JobHistory, PlacedVariable
from ps_protocol.cluster.view import ClusterStatus, MemberStatus, Role
from ps_protocol.cluster.weights import WeightsPiece, WeightsState
from ps_protocol.errors import DamagedData
from ps_protocol.logs import EventLogger
from ps_protocol.model.spec import ShardMap
from ps_server.coordinator import times
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.history.curve_book import CurveBook, Key, Spread
from ps_server.coordinator.history.history_file import HistoryFile, SavedHistory
from ps_server.glance.alerts import Alert
from ps_server.glance.job import glance_of
from ps_server.glance.workers import clock_now, has_stepped

logger = EventLogger(__name__)

STEPS, SAMPLES, BYTES = "steps/s", "samples/s", "bytes/s"
STALENESS, SPREAD, WORKERS = "staleness", "clock spread", "workers"


def sample(status: ClusterStatus) -> dict[Key, Spread]:
    """Sums of rates over live members, bounds over live workers, and what scripts report, by name of the curve."""
    live = [entry for entry in status.members if not entry.gone]
    workers = [entry for entry in live if entry.member.role is Role.WORKER]
    shards = [entry for entry in live if entry.member.role is Role.SHARD]
    found = {
        (STEPS, False): _total(entry.stats.steps_per_second for entry in workers),
        (SAMPLES, False): _total(entry.stats.samples_per_second for entry in workers),
        (BYTES, False): _total(entry.stats.bytes_per_second for entry in shards),
        (WORKERS, False): _one(len(workers)),
    }
    if workers:
        found[STALENESS, False] = spread_of(entry.stats.staleness for entry in workers)
        found[SPREAD, False] = _one(clock_spread(workers))
    for role, suffix in ((Role.WORKER, ""), (Role.EVALUATOR, " (evaluator)")):
        reports: dict[str, list[float]] = {}
        for entry in live:
            if entry.member.role is role:
                for name, value in entry.stats.metrics.items():
                    reports.setdefault(name + suffix, []).append(value)
        found |= {(name, True): spread_of(values) for name, values in reports.items()}
    return found


def clock_spread(workers: Sequence[MemberStatus]) -> int:
    """About how many steps the first worker is ahead of the last, among those in the highest phase.

    A worker that has not pushed since it joined has no clock yet.
    """
    stepped = [entry for entry in workers if has_stepped(entry)]
    phase = max((entry.stats.phase for entry in stepped), default=0)
    clocks = [clock_now(entry) for entry in stepped if entry.stats.phase == phase]
    return round(max(clocks) - min(clocks)) if clocks else 0


def spread_of(values: Iterable[float]) -> Spread:
    """The spread of the finite ``values``."""
    spread = Spread()
    for value in values:
        if math.isfinite(value):
            spread.take(value, value, value)
    return spread


def _one(value: float) -> Spread:
    return spread_of((value,))


def _total(values: Iterable[float]) -> Spread:
    return _one(sum(value for value in values if math.isfinite(value)))


K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Totals:
    #: Time and total, oldest first; only the first may be older than the window.
    marks: deque[tuple[float, float]] = field(default_factory=deque)


class RateWindow(Generic[K]):
    """Called by its owner, with rising times in seconds."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._totals: dict[K, _Totals] = {}

    def take(self, key: K, at: float, total: float) -> None:
        """Add the total of ``key`` at this time; if it has fallen, as by a restart, earlier totals are dropped."""
        marks = self._totals.setdefault(key, _Totals()).marks
        if marks and total < marks[-1][1]:
            marks.clear()
        marks.append((at, total))
        while len(marks) > 2 and at - marks[1][0] >= self._window_seconds:
            marks.popleft()

    def keep(self, keys: Collection[K]) -> None:
        """Drop all other keys."""
        for key in self._totals.keys() - set(keys):
            del self._totals[key]

    def rate(self, key: K) -> float:
        """The rate per second; 0 while there is no time to divide by."""
        totals = self._totals.get(key)
        if totals is None or len(totals.marks) < 2:
            return 0.0
        marks = totals.marks
        (begin, first), (end, last) = marks[0], marks[-1]
        return (last - first) / (end - begin) if end > begin else 0.0


NAMED = 64
"""Of each model, so many of the largest variables are named; the others are one entry."""


def placement_of(maps: Iterable[ShardMap]) -> tuple[PlacedVariable, ...]:
    """The placement by model: its largest variables first, then the others together, then its tables."""
    return tuple(entry for shard_map in maps for entry in _of_model(shard_map))


def _of_model(shard_map: ShardMap) -> list[PlacedVariable]:
    spec = shard_map.spec
    amounts: list[Counter[int]] = [Counter() for _ in spec.variables]
    for piece in shard_map.slices:
        rows = piece.row_end - piece.row_begin
        amounts[piece.variable][piece.shard] += rows * spec.variables[piece.variable].row_bytes
    placed = [
        PlacedVariable(spec.name, variable.name, dict(sorted(held.items())))
        for variable, held in zip(spec.variables, amounts, strict=True)
    ]
    placed.sort(key=lambda entry: (-sum(entry.amounts.values()), entry.name))
    if len(placed) > NAMED:
        placed[NAMED - 1 :] = [_together(spec.name, placed[NAMED - 1 :])]
    tables = [
        PlacedVariable(spec.name, table.name, dict(sorted(Counter(owners).items())), table=True)
        for table, owners in zip(spec.tables, shard_map.tables, strict=True)
    ]
    return placed + tables


def _together(model: str, small: list[PlacedVariable]) -> PlacedVariable:
    total: Counter[int] = Counter()
    for entry in small:
        total.update(entry.amounts)
    return PlacedVariable(model, f"{len(small)} smaller variables", dict(sorted(total.items())), count=len(small))


READERS = 20
"""Of each name of published weights, the readers that are told."""

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

        ``file``: the history continues from it, and is saved to it.
        """
        self._driver = driver
        self._settings = driver.settings
        #: Shown unchanged; the owner may add to it.
        self.configuration = dict(configuration or {})
        self._clock = clock
        self._began = clock()
        self._curves = CurveBook(self._settings.heartbeat_seconds)
        #: Shares of waiting in the last 10 s; growth of tables in the last minute.
        self._waits: RateWindow[tuple[int, int, str]] = RateWindow(10.0)
        self._rows: RateWindow[tuple[str, str]] = RateWindow(60.0)
        self._checkpoints: deque[CheckpointFacts] = deque(maxlen=CHECKPOINTS)
        #: Cached placement of the models, with their epochs: it rarely changes, and a model may have many slices.
        self._placed: tuple[Mapping[str, int], tuple[PlacedVariable, ...]] = ({}, ())
        self._alerts: tuple[Alert, ...] = ()
        self._file = file
        self._saved_at = clock()
        self._cannot_save = False
        if file is not None:
            self._restore(file)

    async def run(self) -> None:
        """Observe the job until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._settings.heartbeat_seconds)

    async def look(self) -> None:
        """Observe the job once; save the history at intervals."""
        self.observe()
        if self._clock() - self._saved_at >= times.SAVE_SECONDS:
            await self.save()

    async def save(self) -> None:
        """Save the history to the file, if there is one. A failure is logged once, until saving works again."""
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
        """Observe the job once."""
        now, status = self._clock(), self._driver.status()
        self._curves.add(now, sample(status))
        self._observe_waits(now, status)
        self._observe_tables(now, status)
        self._observe_alerts(glance_of(self._history(status)).alerts)

    def saved(self, folder: str, size_bytes: int, seconds: float, there: Collection[str] = (), step: int = 0) -> None:
        """Note a written checkpoint of ``step``. ``there``: all checkpoints in its directory; others of that directory
        are dropped.
        """
        directory = Path(folder).parent
        kept = [each for each in self._checkpoints if Path(each.folder).parent != directory or each.folder in there]
        self._checkpoints = deque(kept, maxlen=CHECKPOINTS)
        self._checkpoints.append(CheckpointFacts(folder, size_bytes, seconds, self._clock(), step))

    def kept(self, folder: str, why: str) -> None:
        """Note why a checkpoint is kept beside the newest ones."""
        for at, each in enumerate(self._checkpoints):
            if each.folder == folder:
                self._checkpoints[at] = replace(each, kept=why)

    def history(self) -> JobHistory:
        """The current state of the job and its history."""
        publications = tuple(map(_newest_alone, self._driver.weights(READERS)))
        return replace(self._history(self._driver.status()), curves=self._curves.curves(), publications=publications)

    def _history(self, status: ClusterStatus) -> JobHistory:
        """The history without curves and published weights."""
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
        """Add an event for each alert that begins or ends."""
        before, now = {alert.key for alert in self._alerts}, {alert.key for alert in found}
        for alert in found:
            if alert.key not in before:
                self._driver.events.add(f"alert: {alert.text}", warning=True)
        for alert in self._alerts:
            if alert.key not in now:
                self._driver.events.add(f"over: {alert.text}")
        self._alerts = found


def _newest_alone(state: WeightsState) -> WeightsState:
    """Bounded: a job may have a thousand shards, and as many versions of a name."""
    newest = state.readable
    if newest is not None:
        newest = replace(newest, metadata="", pieces=(WeightsPiece(0, 0, "", b"", newest.size_bytes),))
    return replace(state, versions=() if newest is None else (newest,), pins=(), gone=())


def rows_by_table(status: ClusterStatus) -> dict[tuple[str, str], int]:
    """Rows of each table over the live shards, by model and table."""
    rows: Counter[tuple[str, str]] = Counter()
    for entry in _live(status, Role.SHARD):
        for counts in entry.stats.tables:
            rows[counts.model, counts.table] += counts.rows
    return dict(rows)


def _live(status: ClusterStatus, role: Role) -> list[MemberStatus]:
    return [entry for entry in status.members if entry.member.role is role and not entry.gone]
