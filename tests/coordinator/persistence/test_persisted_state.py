"""What a coordinator that is started again knows."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ps_protocol.cluster.view import Joined, Role
from ps_protocol.errors import ConfigError, DamagedData, Fenced, PsError
from ps_protocol.model.spec import Consistency, Mode
from ps_server.coordinator.persistence.cluster_records import ClusterRecords, changed_rows, from_rows
from ps_server.coordinator.placement.variables import FixedShards, MaxSize, MinSize
from ps_server.coordinator.state import ClusterState
from tests.coordinator.cluster import SPEC, Cluster
from tests.support.length import choose


class Kept:
    """Rows as a journal keeps them, brought forward by changes only."""

    def __init__(self) -> None:
        self.rows: dict[str, bytes] = {}
        self.records: ClusterRecords | None = None
        self.written: set[str] = set()

    def keep(self, records: ClusterRecords) -> ClusterRecords:
        """Write what changed; returns what a reader makes of all rows."""
        changes = changed_rows(self.records, records)
        self.records, self.written = records, set(changes)
        for key, value in changes.items():
            if value is None:
                del self.rows[key]
            else:
                self.rows[key] = value
        again = from_rows(self.rows, "here")
        assert again is not None
        return again


def restarted(c: Cluster, kept: Kept | None = None) -> Cluster:
    """The same cluster with a coordinator brought back from rows."""
    again = Cluster()
    again.state = ClusterState.restore(c.settings, (kept or Kept()).keep(c.state.persisted_state()), c.now)
    again.settings, again.now, again.joins = c.settings, c.now, c.joins
    return again


def running(**settings: Any) -> tuple[Cluster, Joined, Joined]:
    c = Cluster(**settings)
    shard, worker = c.shard(), c.worker()
    c.declare(worker)
    return c, shard, worker


def test_a_threshold_of_workers_is_kept_and_a_journal_of_0_1_0_has_a_number() -> None:
    c, kept = running()[0], Kept()
    c.state.set_consistency(Consistency.of("async", stale_policy="reject", stale_threshold="workers"))
    assert restarted(c, kept).state.view.consistency == c.state.view.consistency
    cluster = json.loads(kept.rows["cluster"])
    del cluster["consistency"]["stale_by_workers"]
    cluster["consistency"]["stale_threshold"] = 3
    kept.rows["cluster"] = json.dumps(cluster).encode()
    records = from_rows(kept.rows, "here")
    assert records is not None
    assert records.consistency == Consistency.of("async", stale_policy="reject", stale_threshold=3)


def test_members_keep_their_places_and_nobody_joins_again() -> None:
    c, shard, worker = running()
    again = restarted(c)
    assert again.state.view == c.state.view
    again.heartbeat(shard), again.heartbeat(worker)
    assert again.declare(worker) == c.state.placement.shard_map("net")


def test_members_have_a_whole_lease_from_the_restart_by_the_length_they_were_told() -> None:
    c = Cluster(lease_seconds=5.0)
    c.worker()
    c.settings = replace(c.settings, lease_seconds=60.0)
    c.now = 1000.0
    again = restarted(c)
    again.now = 1001.0
    again.worker()
    assert again.state.membership.next_expiry() == 1005.0
    assert len(again.state.membership.expire(1006.0).value) == 1
    assert again.state.membership.next_expiry() == 1061.0


def test_incarnations_and_revisions_rise_on_also_when_the_clock_was_set_back() -> None:
    c, _, worker = running()
    c.settings = replace(c.settings, first_incarnation=1)
    again = restarted(c)
    later = again.worker()
    assert later.member.incarnation == worker.member.incarnation + 1
    assert later.revision == c.state.view.revision + 1


def test_the_fenced_stay_fenced_and_are_told_why() -> None:
    c = Cluster()
    old = c.worker(0)
    c.worker(0)
    with pytest.raises(Fenced, match="took its place"):
        restarted(c).heartbeat(old)


def test_a_barrier_waits_for_all_again_and_one_that_has_opened_stays_open() -> None:
    c, _, a = running()
    b = c.worker()
    c.arrive(a), c.arrive(b)
    c.arrive(a, phase=1)
    again = restarted(c)
    assert again.arrive(b, phase=0)
    assert not again.arrive(b, phase=1)
    assert again.arrive(a, phase=1)


def test_who_had_been_there_before_the_start_still_counts() -> None:
    c = Cluster(expected_workers=2)
    c.shard()
    c.leave(c.worker(0))
    again = restarted(c)
    assert not again.state.view.started
    again.worker(1)
    assert again.state.view.started


def test_after_the_end_of_a_job_a_new_run_waits_for_all_again_and_keeps_models_phase_and_counts() -> None:
    c, shard, worker = running(expected_workers=1)
    c.arrive(worker)
    c.leave(worker)
    c.state.release()
    again = restarted(c)
    view = again.state.view
    assert (view.started, view.finished, view.models) == (False, False, {"net": 1})
    assert view.revision > c.state.view.revision
    again.heartbeat(shard)
    newcomer = again.worker()
    assert again.state.view.started
    assert newcomer.phase == 1
    assert newcomer.member.incarnation > worker.member.incarnation
    assert again.declare(newcomer) == c.state.placement.shard_map("net")


def test_a_finished_job_whose_last_checkpoint_is_not_written_is_finished_after_the_restart_too() -> None:
    c, _, worker = running(expected_workers=2)
    lost = c.worker()
    c.leave(lost, "killed")
    c.leave(worker)
    assert c.state.view.finished
    again = restarted(c)
    assert again.state.view == c.state.view
    # One that is started again, for it was lost before the end, does its work without the others.
    again.worker()
    assert (again.state.view.started, again.state.view.finished) == (True, False)


@pytest.mark.parametrize(
    ("changes", "journal", "flag"),
    [
        ({"expected_shards": 3}, "--shards 2", "--shards 3"),
        ({"expected_workers": 1}, "--workers 4", "--workers 1"),
        ({"seed": 9}, "--seed 5", "--seed 9"),
        (
            {"partition": MaxSize(1024)},
            "--partition fixed --partition-slices 2",
            "--partition max --partition-bytes 1024 --partition-slices 0",
        ),
        ({"seed": 9, "expected_shards": 3}, "--shards 2, --seed 5", "--shards 3, --seed 9"),
    ],
)
def test_settings_of_another_job_are_refused_naming_both_values(
    changes: dict[str, Any], journal: str, flag: str
) -> None:
    c = Cluster(expected_shards=2, expected_workers=4, seed=5, partition=FixedShards(2))
    with pytest.raises(ConfigError) as caught:
        ClusterState.restore(replace(c.settings, **changes), c.state.persisted_state(), 0.0)
    assert (caught.value.expected, caught.value.actual) == (journal, flag)
    assert "--data-dir" in caught.value.remedy


@pytest.mark.parametrize("rule", [FixedShards(3), MinSize(10, 2), MaxSize(10, 2)])
def test_every_partition_rule_is_read_back(rule: Any) -> None:
    c = Cluster(partition=rule)
    assert Kept().keep(c.state.persisted_state()).identity.partition == rule


def test_only_what_changed_is_written() -> None:
    c, kept = Cluster(), Kept()
    c.shard()
    members = [c.worker() for _ in range(50)]
    c.declare(members[0])
    kept.keep(c.state.persisted_state())
    for member in members:
        c.heartbeat(member)
    c.now = 3.0
    kept.keep(c.state.persisted_state())
    assert kept.written == set()
    c.worker()
    kept.keep(c.state.persisted_state())
    assert kept.written == {"cluster", "place/worker/50"}
    c.leave(members[7])
    kept.keep(c.state.persisted_state())
    assert kept.written == {"cluster", "place/worker/7", "gone"}


def test_thousands_of_members_that_came_and_went_leave_rows_of_constant_size() -> None:
    c, kept = Cluster(), Kept()
    c.shard()

    def nbytes_after(times: int) -> int:
        for _ in range(times):
            c.leave(c.worker(), "ValueError")
            c.worker(1)
            kept.keep(c.state.persisted_state())
        return sum(map(len, kept.rows.values()))

    before = nbytes_after(200)
    # Numbers grow by a digit.
    assert nbytes_after(choose(5_000, 400)) < before * 1.1


def drop(key: str) -> Callable[[dict[str, bytes]], object]:
    return lambda rows: rows.pop(key)


def put(key: str, value: bytes) -> Callable[[dict[str, bytes]], object]:
    return lambda rows: rows.update({key: value})


def change(key: str, before: bytes, after: bytes) -> Callable[[dict[str, bytes]], object]:
    return lambda rows: rows.update({key: rows[key].replace(before, after)})


@pytest.mark.parametrize(
    ("harm", "row"),
    [
        (drop("cluster"), "cluster"),
        (drop("identity"), "identity"),
        (put("cluster", b"{}"), "cluster"),
        (put("gone", b"{"), "gone"),
        (put("gone", b"[" * 100_000), "gone"),
        (put("exchanges", b'{"dropped":{},"live":[[0,null]],"late":[]}'), "exchanges"),
        (put("place/worker/0", b"[]"), "place/worker/0"),
        (change("place/worker/0", b'"index":0', b'"index":"0"'), "place/worker/0"),
        (change("place/worker/0", b'"incarnation":', b'"incarnation":0.'), "place/worker/0"),
        (change("place/worker/0", b'"lease_seconds":', b'"lease_seconds":true,"x":'), "place/worker/0"),
        (put("map/net", b"\xff\xff"), "map/net"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(harm: Callable[[dict[str, bytes]], object], row: str) -> None:
    c, _, _ = running()
    kept = Kept()
    kept.keep(c.state.persisted_state())
    harm(kept.rows)
    with pytest.raises(DamagedData, match=f"journal here is damaged: its row '{row}' cannot be read"):
        from_rows(kept.rows, "here")


# Random histories


def outcome(event: Callable[[Cluster], Any], c: Cluster) -> Any:
    try:
        return event(c)
    except PsError as error:
        return type(error), str(error)


def random_event(
    chance: random.Random, joined: list[Joined], arrived: list[tuple[Joined, int]]
) -> Callable[[Cluster], Any]:
    """An event by one of ``joined``, or a join; one that waits at a barrier is noted in ``arrived``."""
    # Mostly of those who came last: the others are fenced.
    who = chance.choice(joined[-chance.choice([4, 4, 4, 40]) :]) if joined else None
    if who is None or chance.random() < 0.25:
        role = chance.choice([Role.SHARD, Role.WORKER, Role.WORKER, Role.EVALUATOR])
        index = chance.randrange(2) if role is Role.SHARD else chance.choice([None, 0, 1, 2])
        brings = [0, *(j.member.incarnation for j in joined if j.member.role is role and role is Role.SHARD)]
        state, token = chance.choice(brings), f"token {chance.randrange(60)}"
        return lambda c: c.join(role, index, token, state)
    if who.member.role is not Role.WORKER:
        return chance.choice([lambda c: c.keep(who), lambda c: c.leave(who, "why")])
    phase, spec = chance.randrange(3), replace(SPEC, name=chance.choice("ab"))
    bound = chance.randrange(3)
    if chance.random() < 0.4:

        def arrive(c: Cluster) -> bool:
            if released := c.arrive(who, phase):
                return released
            arrived.append((who, phase))
            return False

        return arrive
    return chance.choice(
        [
            lambda c: c.leave(who),
            lambda c: c.declare(who, spec),
            lambda c: c.state.set_consistency(Consistency(Mode.SSP, bound, stale_by_workers=bound > 1)).reason,
            lambda c: c.heartbeat(who),
        ]
    )


def see(c: Cluster) -> Any:
    """All that can be seen of a cluster, the next incarnation included."""
    return c.state.view, c.state.membership.phase, c.state.persisted_state()


@pytest.mark.parametrize("seed", range(choose(30, 5)))
def test_after_any_history_a_restarted_coordinator_answers_as_the_one_that_was_not(seed: int) -> None:
    print(f"seed {seed}")
    chance, kept = random.Random(seed), Kept()
    one = Cluster(expected_shards=2, expected_workers=2)
    joined: list[Joined] = []
    arrived: list[tuple[Joined, int]] = []
    for _ in range(120):
        if one.state.view.finished and chance.random() < 0.5:
            # A restart from here on begins a new run: the two would differ on purpose.
            one.state.release()
            one = restarted(one, kept)
        again = restarted(one, kept)
        for who, phase in arrived:
            # Arrivals are not kept: workers repeat them.
            if phase == one.state.membership.phase and who.member in one.state.view.members:
                again.arrive(who, phase)
        assert see(again) == see(one)
        event = random_event(chance, joined, arrived)
        answer = outcome(event, one)
        assert outcome(event, again) == answer
        if isinstance(answer, Joined):
            joined.append(answer)
        assert see(again)[:2] == see(one)[:2]
        one = chance.choice([one, again])
