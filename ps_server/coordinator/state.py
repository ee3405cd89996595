"""The decisions of the coordinator: who is a member, which shards hold the models, which mode is in force."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ps_protocol.cluster.scaling import ScaleAsk
from ps_protocol.cluster.view import ClusterStatus, ClusterView
from ps_protocol.model.spec import Consistency
from ps_server.coordinator.changes import CurrentView, StateChange
from ps_server.coordinator.membership.scaling import Scaling, WantedSize, scaled
from ps_server.coordinator.membership.state import STARTS, MembershipState
from ps_server.coordinator.persistence.cluster_records import ClusterRecords
from ps_server.coordinator.placement.state import PlacementState
from ps_server.coordinator.publications import Publications
from ps_server.coordinator.settings import ClusterSettings, check_consistency, check_same_job


class ClusterState:
    """The cluster as one state machine. Called by the driver, from one loop; does no I/O and reads no clock.

    Times are seconds of any steady clock. An event that raises has changed nothing. ``membership``, ``placement``
    and ``publications`` handle the events of members, of models and of published weights; the first two share the view
    with this class, which handles events of both.
    """

    def __init__(self, settings: ClusterSettings, phase: int = 0) -> None:
        """Begin in ``phase``. Raises InvalidRequest when the settings' consistency mode cannot work."""
        check_consistency(settings.consistency, settings.always_workers)
        self._settings = settings
        self._view = CurrentView(
            ClusterView(
                consistency=settings.consistency,
                expected_shards=settings.expected_shards,
                expected_workers=settings.expected_workers,
                least_workers=settings.least_workers,
            )
        )
        self._scaling = Scaling()
        self.membership = MembershipState(settings, self._view, phase, self._scaling)
        self.placement = PlacementState(settings.partition, settings.limits, self._view)
        self.publications = Publications(settings.job_id)

    @classmethod
    def restore(cls, settings: ClusterSettings, records: ClusterRecords, now: float) -> ClusterState:
        """Restore the cluster; see ``MembershipState.restore`` for its members.

        The mode is that of ``records``. A finished job whose last data is written begins a new run: models and phase
        stay. Raises ConfigError when ``settings`` are of another job.
        """
        check_same_job(settings, records.identity)
        state = cls(replace(settings, consistency=records.consistency), records.membership.phase)
        is_over = records.finished and records.released
        state.membership.restore(records.membership, now, finished=is_over)
        state.placement.restore(records.maps)
        state._scaling.wanted = records.wanted
        state._view.now = replace(
            state.view,
            revision=records.revision,
            members=state.membership.members,
            models=state.placement.epochs,
            started=records.started,
            finished=records.finished,
            expected_shards=records.shards,
            spare=records.spare,
            released_models=records.released_models,
            wanted_workers=state._scaling.workers,
            wanted_shards=_count(state.wanted.shards),
        )
        state.placement.uses.restore(records.uses)
        state.publications.restore(records.publications)
        if is_over:
            state._view.change(started=False, finished=False)
        if records.moving:
            # Shards paused for this move have seen the last revision, and wait for a newer one.
            state._view.change(moving="")
        return state

    def persisted_state(self) -> ClusterRecords:
        """The state for ``restore``; data leases are kept elsewhere."""
        return ClusterRecords(
            identity=self._settings.identity,
            revision=self.view.revision,
            started=self.view.started,
            finished=self.view.finished,
            consistency=self.view.consistency,
            membership=self.membership.persisted_state(),
            maps=dict(self.placement.shard_maps),
            shards=self.view.expected_shards,
            spare=self.view.spare,
            moving=self.view.moving,
            released_models=self.view.released_models,
            uses=self.placement.uses.records,
            released=self.view.released,
            wanted=self.wanted,
            publications=self.publications.records,
        )

    @property
    def view(self) -> ClusterView:
        """The newest view. Its revision rises with every change and never falls, also over ``restore``."""
        return self._view.now

    def status(self, now: float) -> ClusterStatus:
        """The view, the live members with their statistics, and the last former ones."""
        return ClusterStatus(
            self.view,
            self.membership.statuses(now),
            at_seconds=self._settings.clock_began + now,
            job=self._settings.job,
            job_id=self._settings.job_id,
            stale_rules={
                name: str(shard_map.spec.stale)
                for name, shard_map in self.placement.shard_maps.items()
                if shard_map.spec.stale is not None
            },
        )

    @property
    def wanted(self) -> WantedSize:
        """The wanted size since the job was scaled."""
        return self._scaling.wanted

    def scale(self, ask: ScaleAsk, *, by_count: bool = False) -> StateChange[WantedSize]:
        """Set the wanted size of the job. ``by_count``: see WantedSize. Raises the errors of ``scaled``."""
        before = self.wanted
        after = scaled(before, ask, self.view, self._settings.most_workers, by_count=by_count)
        if after == before:
            return StateChange(before)
        self._scaling.wanted = after
        self._view.change(wanted_workers=self._scaling.workers, wanted_shards=_count(after.shards))
        parts = [] if ask.workers is None else [f"{ask.workers} workers"]
        parts += [] if ask.shards is None else [f"{ask.shards} shards"]
        return StateChange(after, f"the job is to have {' and '.join(parts)}")

    def choose_shards(self, numbers: Collection[int]) -> StateChange[None]:
        """If the job's shards were scaled, make these the wanted ones."""
        before = self.wanted
        if before.shards is None or before.shards == frozenset(numbers):
            return StateChange(None)
        self._scaling.wanted = replace(before, number=before.number + 1, shards=frozenset(numbers))
        self._view.change(wanted_shards=len(numbers))
        return StateChange(None, f"the shards {', '.join(map(str, sorted(numbers)))} are wanted")

    def set_consistency(self, consistency: Consistency) -> StateChange[ClusterView]:
        """Change the mode of the job. Raises InvalidRequest if it cannot work."""
        check_consistency(consistency, self._settings.always_workers)
        before = self.view.consistency
        if consistency == before:
            return StateChange(self.view)
        self._view.change(consistency=consistency)
        return StateChange(self.view, f"consistency changed from {before} to {consistency}")

    def use_shards(self, numbers: Collection[int]) -> StateChange[None]:
        """Place new models on these shards; all others become spare, and the job does not wait for them.

        Raises InvalidRequest for numbers that the job does not have, NotReady if another shard is not empty.
        """
        spare = self.placement.spare(numbers)
        if spare == self.view.spare:
            return StateChange(None)
        used = sorted(numbers)
        starts = self.membership.starts(used)
        self._view.change(spare=spare, started=self.view.started or starts)
        reason = f"models are placed on the shards {', '.join(map(str, used))}"
        return StateChange(None, f"{reason}; {STARTS}" if starts else reason)

    def release(self) -> StateChange[None]:
        """Release the members of a finished job, once its last data is on disk."""
        if not self.view.finished or self.view.released:
            return StateChange(None)
        self._view.change(released=True)
        return StateChange(None, "no member is needed any more")


def _count(numbers: Collection[int] | None) -> int | None:
    return None if numbers is None else len(numbers)
