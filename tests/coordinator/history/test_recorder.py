"""The history of a job, as the coordinator tells it: curves, events, alerts, waits, growth."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from ps_protocol import PROTOCOL_VERSION
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.history import JobHistory
from ps_protocol.cluster.view import Joined, JoinRequest, MemberStats, Role, TableCounts
from ps_protocol.cluster.weights import FollowAsk, PublishAsk, ShardHome, WeightsPiece
from ps_protocol.model.spec import Consistency, Mode
from ps_protocol.wire.convert.cluster import history_from_pb, history_to_pb
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.history.recorder import JobRecorder
from ps_server.coordinator.settings import ClusterSettings
from ps_server.glance.job import glance_of
from tests.support.coordinators import connected


class Recorded:
    """A driver and its recorder in a time of their own."""

    def __init__(self, **settings: Any) -> None:
        self.now = 1000.0
        self.driver = Driver(ClusterSettings(**settings), clock=lambda: self.now)
        self.recorder = JobRecorder(self.driver, {"seed": "7"}, clock=lambda: self.now)

    def join(self, role: Role, index: int) -> Joined:
        address = "127.0.0.1:1" if role is Role.SHARD else ""
        return self.driver.join(JoinRequest(role, index, address, f"{role.value}{index}", PROTOCOL_VERSION, "host", 1))

    def beat(self, joined: Joined, **stats: Any) -> None:
        member = joined.member
        self.driver.heartbeat(member.role, member.index, member.incarnation, MemberStats(**stats))

    @property
    def events(self) -> list[str]:
        return [event.text for event in self.recorder.history().events]


def recorded(**settings: Any) -> Callable[[Callable[[Recorded], None]], Callable[[], None]]:
    """Give a test a job with these settings, in an event loop."""

    def made(test: Callable[[Recorded], None]) -> Callable[[], None]:
        async def run() -> None:
            test(Recorded(**settings))

        return lambda: asyncio.run(run())

    return made


def means(history: JobHistory) -> dict[str, list[float]]:
    return {each.name: list(each.mean) for each in history.curves.curves}


@recorded(expected_workers=2)
def test_curves_are_sums_bounds_and_means_of_what_members_tell(job: Recorded) -> None:
    workers = [job.join(Role.WORKER, rank) for rank in range(2)]
    shard = job.join(Role.SHARD, 0)
    for second in range(3):
        for rank, worker in enumerate(workers):
            loss = {"loss": 4.0 - second + rank}
            job.beat(
                worker, steps_per_second=2.0, samples_per_second=10.0, staleness=rank, clock=5 + rank, metrics=loss
            )
        job.beat(shard, bytes_per_second=100.0)
        job.recorder.observe()
        job.now += 1.0
    history = job.recorder.history()
    found = means(history)
    assert found["steps/s"] == [4.0] * 3
    assert found["samples/s"] == [20.0] * 3
    assert found["bytes/s"] == [100.0] * 3
    assert found["loss"] == [4.5, 3.5, 2.5]
    assert found["clock spread"] == [1.0] * 3
    (loss,) = [each for each in history.curves.curves if each.reported]
    assert (list(loss.low), list(loss.high)) == ([4, 3, 2], [5, 4, 3])
    assert (history.began_seconds, history.at_seconds) == (1000.0, 1003.0)


@recorded()
def test_events_tell_joins_changes_of_the_mode_and_losses(job: Recorded) -> None:
    worker = job.join(Role.WORKER, 0)
    job.join(Role.SHARD, 0)
    job.driver.set_consistency(Consistency(Mode.SYNC))
    job.driver.leave(Role.WORKER, 0, worker.member.incarnation, "ValueError: bad")
    assert "worker 0 joined" in job.events[0]
    assert job.events[2] == "consistency changed from async to sync"
    last = job.recorder.history().events[-1]
    assert "ValueError: bad" in last.text
    assert last.warning


@recorded()
def test_an_alert_comes_and_goes_as_events(job: Recorded) -> None:
    worker, shard = job.join(Role.WORKER, 0), job.join(Role.SHARD, 0)
    job.beat(worker)
    job.recorder.observe()
    before = len(job.events)
    job.now += 6.0
    job.beat(worker)
    job.recorder.observe()
    assert job.events[before:] == ["alert: shard 0 has sent no heartbeat for 6 s"]
    job.recorder.observe()
    job.beat(shard)
    job.recorder.observe()
    assert job.events[before + 1 :] == ["over: shard 0 has sent no heartbeat for 6 s"]


@recorded()
def test_waits_are_shares_of_the_last_seconds(job: Recorded) -> None:
    worker = job.join(Role.WORKER, 3)
    for second in range(8):
        job.beat(worker, wait_seconds={"round": 0.25 * second, "pull": 0.0})
        job.recorder.observe()
        job.now += 1.0
    assert job.recorder.history().wait_shares == {3: {"round": pytest.approx(0.25), "pull": 0.0}}
    job.driver.leave(Role.WORKER, 3, worker.member.incarnation, "")
    assert job.recorder.history().wait_shares == {}


@recorded(expected_shards=2)
def test_tables_grow_by_the_rows_of_all_shards(job: Recorded) -> None:
    shards = [job.join(Role.SHARD, number) for number in range(2)]
    for second in range(5):
        for shard in shards:
            job.beat(shard, tables=(TableCounts("net", "ads", 10 * second, 0, 0, 0, 0, 0),))
        job.recorder.observe()
        job.now += 1.0
    assert job.recorder.history().table_growth == {("net", "ads"): pytest.approx(20.0)}


@recorded()
def test_checkpoints_are_remembered(job: Recorded) -> None:
    folders = [f"/saves/c{number}" for number in range(30)]
    for folder in folders:
        job.recorder.saved(folder, 100, 0.5, folders)
    kept = job.recorder.history().checkpoints
    assert [each.folder for each in kept] == folders[10:]


@recorded()
def test_checkpoints_that_were_removed_are_forgotten_and_those_of_another_directory_are_not(job: Recorded) -> None:
    job.recorder.saved("/before/c1", 100, 0.5, ["/before/c1"])
    for number in range(5):
        folders = [f"/saves/c{each}" for each in range(number + 1)][-2:]
        job.recorder.saved(folders[-1], 100, 0.5, folders)
    kept = job.recorder.history().checkpoints
    assert [each.folder for each in kept] == ["/before/c1", "/saves/c3", "/saves/c4"]


@recorded(expected_workers=3)
def test_a_worker_that_has_not_pushed_yet_is_not_behind(job: Recorded) -> None:
    """As when a job goes on: members begin at no position, while others are at theirs already."""

    workers = [job.join(Role.WORKER, rank) for rank in range(3)]
    job.join(Role.SHARD, 0)
    job.beat(workers[0], clock=5000)
    job.beat(workers[1], clock=5003)
    job.recorder.observe()
    history = job.recorder.history()
    assert means(history)["clock spread"] == [3.0]
    assert [worker.behind for worker in glance_of(history).workers] == [3, 0, 0]


@recorded()
def test_a_history_survives_the_wire(job: Recorded) -> None:
    worker = job.join(Role.WORKER, 0)
    job.join(Role.SHARD, 0)
    for second in range(3):
        job.beat(worker, metrics={"loss": 0.5}, wait_seconds={"pull": 0.1 * second})
        job.recorder.observe()
        job.now += 1.0
    job.recorder.saved("c1", 100, 0.5)
    history = job.recorder.history()
    told = history_from_pb(history_to_pb(history))
    assert history_to_pb(told) == history_to_pb(history)
    assert (told.status, told.events, told.checkpoints) == (history.status, history.events, history.checkpoints)
    assert told.wait_shares == history.wait_shares
    assert told.configuration == {"seed": "7"}


def test_a_client_gets_the_history_and_the_last_points_of_it() -> None:
    with connected(ClusterSettings(expected_shards=2)) as client:
        client.join(JoinRequest(Role.WORKER), "a")
        history = client.get_history(last_points=1)
        assert [str(entry.member) for entry in history.status.members] == ["worker 0"]
        assert any("worker 0 joined" in event.text for event in history.events)
        assert len(history.curves.times) <= 1
        assert isinstance(client, CoordinatorClient)


def test_published_weights_are_told_with_their_newest_version_and_few_readers() -> None:
    job = Recorded()
    publications = job.driver._state.publications
    for number in (1, 2):
        ask = PublishAsk("policy", "net", 10 * number, '{"note": "' + "x" * 1000 + '"}', 8, f"token {number}")
        publications.commit(ask, number, [WeightsPiece(0, 1, "", b"c", 100)], 0.0, 900.0)
    home = {0: ShardHome(1, "")}
    for number in range(30):
        publications.follow(FollowAsk("policy", number % 2, 0, str(number), "host", 7), home, job.now, finished=False)
    told = history_from_pb(history_to_pb(job.recorder.history()))
    assert len(history_to_pb(told).publications[0].SerializeToString()) < 2000
    (shown,) = glance_of(told).publications
    assert (shown.name, shown.readers, shown.behind) == ("policy", 30, 2)
    # No shard is there that has a piece in its memory.
    assert (shown.version, shown.step) == (0, 0)
    assert len(told.publications[0].readers) == 20
