"""Observes the coordinator: what it decides, writes and tells."""

from __future__ import annotations

from typing import Any

from ps_protocol.cluster.view import Member, Role
from ps_server.coordinator.data_leases import DataLeases
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.jobs.checkpoints import Checkpoints
from ps_server.coordinator.publications import Publications
from ps_server.coordinator.service import CoordinatorService
from simulation.coordinator_judge import CoordinatorJudge
from simulation.observers.checkpoints import tell_of_checkpoint
from simulation.observers.subjects import Subjects, Wrappers


class CoordinatorObservers:
    """Wrappers around methods of ps-coordinator."""

    def __init__(self, subjects: Subjects) -> None:
        self._subjects = subjects

    @property
    def _judge(self) -> CoordinatorJudge:
        """Of the job that runs."""
        return self._subjects.judge.coordinator

    def wrappers(self) -> Wrappers:
        """All of them."""
        yield from (
            (Driver, "__init__", self._driver_made),
            (Driver, "join", self._join),
            (Driver, "adopt", self._adopt),
            (Driver, "_settle", self._settle),
            (Driver, "barrier", self._barrier),
            (Driver, "lease_data", self._lease_data),
            (DataLeases, "lease", self._lease),
            (Checkpoints, "make", self._make),
            (Checkpoints, "restore", self._restore),
            (CoordinatorService, "_encode", self._encode),
            (Publications, "commit", self._commit),
            (Driver, "follow_weights", self._follow_weights),
        )

    def _driver_made(self, original: Any) -> Any:
        def made(driver: Any, *arguments: Any, **keywords: Any) -> None:
            original(driver, *arguments, **keywords)
            self._released(driver)
            self._subjects.moves.restarted(driver.shard_maps, driver.view.released_models)
            self._judge.started(driver.view, driver._state.membership.phase)
            published = driver._state.publications.records.values()
            self._subjects.judge.published.restarted(
                max((each.newest for each in published), default=0), [v for each in published for v in each.versions]
            )

        return made

    def _join(self, original: Any) -> Any:
        def join(driver: Any, ask: Any) -> Any:
            joined = original(driver, ask)
            self._judge.joined(ask, joined)
            self._subjects.judge.published.homes(driver._state.membership.shard_homes)
            return joined

        return join

    def _adopt(self, original: Any) -> Any:
        def adopt(driver: Any, *arguments: Any) -> Any:
            placed = original(driver, *arguments)
            self._judge.placed(placed)
            return placed

        return adopt

    def _settle(self, original: Any) -> Any:
        def settle(driver: Any, decision: Any) -> Any:
            self._subjects.moves.decided(driver.shard_maps.values())
            if decision.reason:
                self._judge.decided(driver._state.view, driver._state.membership.phase)
            value = original(driver, decision)
            self._released(driver)
            return value

        return settle

    def _released(self, driver: Any) -> None:
        """What the journal says of models that are released."""
        for name, epoch in driver.view.released_models.items():
            self._subjects.judge.places.release(name, epoch)

    def _barrier(self, original: Any) -> Any:
        async def barrier(driver: Any, rank: int, incarnation: int, phase: int, wait_seconds: float) -> Any:
            self._judge.arrived(Member(Role.WORKER, rank, incarnation), phase)
            state = await original(driver, rank, incarnation, phase, wait_seconds)
            if state.released:
                self._judge.released(phase)
            return state

        return barrier

    def _lease(self, original: Any) -> Any:
        def lease(leases: Any, rank: int, incarnation: int, ask: Any, now: float) -> Any:
            decision = original(leases, rank, incarnation, ask, now)
            self._judge.reported(rank, incarnation, ask)
            return decision

        return lease

    def _lease_data(self, original: Any) -> Any:
        async def lease_data(driver: Any, rank: int, incarnation: int, ask: Any, wait_seconds: float) -> Any:
            answer = await original(driver, rank, incarnation, ask, wait_seconds)
            self._judge.leased(Member(Role.WORKER, rank, incarnation), ask, answer)
            return answer

        return lease_data

    def _encode(self, original: Any) -> Any:
        def encode(service: Any, view: Any, before: Any) -> Any:
            for shard_map in service._driver.shard_maps.values():
                if shard_map.epoch == view.models.get(shard_map.spec.name):
                    self._judge.placed(shard_map)
            self._judge.told(view)
            return original(service, view, before)

        return encode

    def _make(self, original: Any) -> Any:
        async def make(checkpoints: Any) -> Any:
            made = await original(checkpoints)
            tell_of_checkpoint(self._subjects, made.folder)
            return made

        return make

    def _restore(self, original: Any) -> Any:
        async def restore(checkpoints: Any, *arguments: Any) -> Any:
            restored, names = await original(checkpoints, *arguments)
            maps = checkpoints._driver.shard_maps
            places = [
                self._subjects.place(shard, maps[name])
                for name in names
                if name in maps
                for shard in maps[name].holders
            ]
            self._subjects.judge.checkpoints.restored(restored.name, places)
            return restored, names

        return restore

    def _commit(self, original: Any) -> Any:
        def commit(publications: Publications, ask: Any, *arguments: Any) -> Any:
            change = original(publications, ask, *arguments)
            self._subjects.judge.published.committed(change.value, ask.keep)
            return change

        return commit

    def _follow_weights(self, original: Any) -> Any:
        async def follow(driver: Driver, ask: Any, wait_seconds: float) -> Any:
            answer = await original(driver, ask, wait_seconds)
            published = self._subjects.judge.published
            published.told(0 if ask.number else ask.have, answer.version, answer.newest)
            if answer.finished:
                published.says_finished()
            return answer

        return follow
