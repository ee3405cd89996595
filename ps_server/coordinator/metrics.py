"""Defines the coordinator's metrics, and reads them from the counters of its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ps_protocol.cluster.view import ClusterStatus, MemberStatus, Role
from ps_protocol.metrics.common import COMMON, read_common
from ps_protocol.metrics.definition import Catalogue, Sample
from ps_protocol.metrics.server import Target
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.jobs.checkpoints import Checkpoints
from ps_server.coordinator.jobs.move_runner import MoveRunner
from ps_server.coordinator.jobs.publish_runner import PublishRunner
from ps_server.limits import LimitCounts
from ps_server.serving.metrics import SERVER, read_limits

COORDINATOR = Catalogue("coordinator", "", COMMON, SERVER)

JOB_INFO = COORDINATOR.gauge(
    "job_info", "Consistency mode of the job, and in full with its bounds; always 1.", "mode", "consistency"
)
JOB_STARTED = COORDINATOR.gauge("job_started", "Whether all expected members have been there once: 1 or 0.")
JOB_FINISHED = COORDINATOR.gauge("job_finished", "Whether every worker has left after training: 1 or 0.")
VIEW_REVISION = COORDINATOR.gauge("view_revision", "Revision of the cluster view; it rises with every change.")
PHASE = COORDINATOR.gauge("phase", "Barriers that the job has passed: the number of the present phase.")

MEMBERS = COORDINATOR.gauge(
    "members",
    "Live members, by role and state: live, busy while a member cannot do its usual work yet, or spare for a shard "
    "without slices.",
    "role",
    "state",
)
EXPECTED = COORDINATOR.gauge(
    "members_expected",
    "Members that a running job needs: shards that hold slices, and workers of a fixed number.",
    "role",
)
HEARTBEAT_AGE = COORDINATOR.gauge(
    "heartbeat_age_seconds", "The longest time since the last heartbeat of a live member.", "role"
)
INCARNATIONS = COORDINATOR.counter("incarnations_total", "Processes that joined.", "role")
EXPIRATIONS = COORDINATOR.counter("lease_expirations_total", "Members lost because no heartbeat came.", "role")
FENCED = COORDINATOR.counter("fenced_calls_total", "Calls refused because their process is not a member any more.")

CLOCK_LEAST = COORDINATOR.gauge(
    "worker_clock_least", "The fewest steps that a live worker has pushed in the present phase: its clock."
)
CLOCK_MOST = COORDINATOR.gauge(
    "worker_clock_most", "The most steps that a live worker has pushed in the present phase."
)
BARRIER_WAIT = COORDINATOR.histogram("barrier_wait_seconds", "From a worker's arrival at a barrier until it opens.")
MODE_CHANGES = COORDINATOR.counter("mode_changes_total", "Changes of the consistency mode.")

DIVERGENCES = COORDINATOR.gauge(
    "divergences",
    "Numbers that have grown far above their own history in async or ssp: norms of gradients, losses. At most 8.",
    "role",
)
DIVERGED = COORDINATOR.counter("divergences_total", "Numbers that were found to have grown far above their history.")

MOVES = COORDINATOR.counter(
    "moves_total", "Batches of slices moved between shards, by result: done or failed.", "result"
)
MOVE_PAUSE = COORDINATOR.histogram("move_pause_seconds", "How long training was paused for one batch of a move.")
CHECKPOINTS = COORDINATOR.counter("checkpoints_total", "Checkpoints, by result: done or failed.", "result")
CHECKPOINT = COORDINATOR.histogram("checkpoint_seconds", "Duration of a checkpoint.")
CHECKPOINT_AGE = COORDINATOR.gauge(
    "checkpoint_age_seconds", "Since the last checkpoint was begun that is complete; absent before the first."
)
PUBLICATIONS = COORDINATOR.counter("weights_versions_total", "Versions published, by result: done or failed.", "result")
PUBLISH = COORDINATOR.histogram("weights_publish_seconds", "From the call of a publisher until a version is committed.")
NEWEST_WEIGHTS = COORDINATOR.gauge("weights_newest_version", "Number of the newest published version.", "name")
WEIGHTS_READERS = COORDINATOR.gauge("weights_readers", "Readers of published weights.", "name")
WEIGHTS_BEHIND = COORDINATOR.gauge(
    "weights_behind_versions",
    "Versions that the reader of published weights that is furthest behind has not got.",
    "name",
)
WEIGHTS_RECEIVED = COORDINATOR.gauge(
    "weights_received_bytes",
    "Bytes of published weights that the present readers have received, by form: delta or full; saved: the bytes that "
    "they did not have to receive thanks to deltas.",
    "name",
    "form",
)
LEASES = COORDINATOR.gauge("data_leases", "Workers that hold a range of a dataset.")
LEASED_ITEMS = COORDINATOR.gauge("data_leased_items", "Items in the ranges of datasets that workers hold.")


class CoordinatorMetrics:
    """Reads the numbers of the coordinator. Called on its event loop."""

    def __init__(
        self,
        driver: Driver,
        checkpoints: Checkpoints,
        moves: MoveRunner,
        limits: LimitCounts,
        publishing: PublishRunner | None = None,
    ) -> None:
        self._publishing = publishing or PublishRunner(driver, checkpoints.busy)
        self._limits = limits
        self._driver = driver
        self._checkpoints = checkpoints
        self._moves = moves

    def read(self) -> Iterator[Sample]:
        """All numbers as they are now."""
        status = self._driver.status()
        yield from read_common()
        yield from read_limits(self._limits)
        yield from _job(status)
        yield PHASE.of(self._driver.phase)
        yield from _members(status)
        yield from self._counted()
        yield from self._jobs()

    def _counted(self) -> Iterator[Sample]:
        counters = self._driver.counters
        for role in Role:
            yield INCARNATIONS.of(counters.joins[role], role.value)
            yield EXPIRATIONS.of(counters.lease_expirations[role], role.value)
        yield FENCED.of(self._driver.fenced_calls)
        yield BARRIER_WAIT.of(counters.barrier_wait.value)
        yield MODE_CHANGES.of(counters.mode_changes)
        yield DIVERGED.of(counters.divergences)

    def _jobs(self) -> Iterator[Sample]:
        moves, checkpoints = self._moves, self._checkpoints
        yield MOVES.of(moves.done, "done")
        yield MOVES.of(moves.failed, "failed")
        yield MOVE_PAUSE.of(moves.pauses.value)
        yield CHECKPOINTS.of(checkpoints.done, "done")
        yield CHECKPOINTS.of(checkpoints.failed, "failed")
        yield CHECKPOINT.of(checkpoints.times.value)
        if (age := checkpoints.age_seconds) is not None:
            yield CHECKPOINT_AGE.of(age)
        yield PUBLICATIONS.of(self._publishing.done, "done")
        yield PUBLICATIONS.of(self._publishing.failed, "failed")
        yield PUBLISH.of(self._publishing.times.value)
        for state in self._driver.weights():
            yield NEWEST_WEIGHTS.of(state.newest, state.name)
            yield WEIGHTS_READERS.of(state.reader_count, state.name)
            yield WEIGHTS_BEHIND.of(state.most_behind, state.name)
            for form, received in (
                ("delta", state.delta_bytes),
                ("full", state.full_bytes),
                ("saved", state.saved_bytes),
            ):
                yield WEIGHTS_RECEIVED.of(received, state.name, form)
        holders, items = self._driver.data_leases
        yield LEASES.of(holders)
        yield LEASED_ITEMS.of(items)


def _job(status: ClusterStatus) -> Iterator[Sample]:
    view = status.view
    yield JOB_INFO.of(1, view.consistency.mode.value, str(view.consistency))
    yield JOB_STARTED.of(view.started)
    yield JOB_FINISHED.of(view.finished)
    yield VIEW_REVISION.of(view.revision)
    for role in (Role.SHARD, Role.WORKER):
        yield DIVERGENCES.of(sum(each.member.role is role for each in status.divergences), role.value)


def _members(status: ClusterStatus) -> Iterator[Sample]:
    view = status.view
    live = [entry for entry in status.members if not entry.gone]
    states = Counter((entry.member.role, _state(entry, view.spare)) for entry in live)
    for role in Role:
        for state in ("live", "busy", *(("spare",) if role is Role.SHARD else ())):
            yield MEMBERS.of(states[role, state], role.value, state)
        if ages := [entry.seconds_since_heartbeat for entry in live if entry.member.role is role]:
            yield HEARTBEAT_AGE.of(max(ages), role.value)
    yield EXPECTED.of(len(view.used_shards), Role.SHARD.value)
    yield EXPECTED.of(view.expected_workers, Role.WORKER.value)
    stats = [entry.stats for entry in live if entry.member.role is Role.WORKER]
    if clocks := [each.clock for each in stats if each.phase == max(other.phase for other in stats)]:
        yield CLOCK_LEAST.of(min(clocks))
        yield CLOCK_MOST.of(max(clocks))


def _state(entry: MemberStatus, spare: frozenset[int]) -> str:
    if entry.stats.activity:
        return "busy"
    return "spare" if entry.member.role is Role.SHARD and entry.member.index in spare else "live"


def targets(status: ClusterStatus) -> Sequence[Target]:
    """The address of the metrics of each live member."""
    return [
        Target(entry.stats.metrics_address, entry.member.role.value)
        for entry in status.members
        if entry.stats.metrics_address and not entry.gone
    ]
