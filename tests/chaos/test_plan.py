"""Faults are drawn from the seed alone."""

from __future__ import annotations

import pytest

from chaos.plan import REPLACED_SECONDS, Kind, Targets, plan

TARGETS = Targets(["coordinator", "shard 0", "worker 0"], ["coordinator", "shard 0"], ["workers–shard 0"], "disk")
LEASE_SECONDS = 3.0


def drawn(seed, *, seconds=1800.0, every=60.0, targets=TARGETS, kills_only=False):
    return plan(seed, seconds, every, LEASE_SECONDS, targets, kills_only=kills_only)


def test_a_seed_draws_the_same_faults_again_and_another_seed_draws_others():
    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.parametrize("seed", range(20))
def test_somebody_is_killed_every_time_and_all_is_over_before_the_end(seed):
    faults = drawn(seed)
    kills = [fault for fault in faults if fault.kind is Kind.KILL]
    assert [fault.at_seconds for fault in kills] == [60.0 * number for number in range(1, 30)]
    assert len(faults) - len(kills) == 15 - (29 % 2 == 0)
    assert all(fault.at_seconds + fault.seconds <= 1790 for fault in faults)
    assert faults == sorted(faults, key=lambda fault: fault.at_seconds)
    assert drawn(seed, kills_only=True) == kills


def test_some_members_lose_their_place_over_a_fault_and_some_do_not():
    for_good = (Kind.KILL, Kind.HANG)
    lasting = [fault.seconds for seed in range(20) for fault in drawn(seed) if fault.kind not in for_good]
    assert min(lasting) < LEASE_SECONDS < max(lasting) <= 1.5 * LEASE_SECONDS


def test_every_kind_and_every_target_comes_up_and_a_disk_is_full_only_where_there_is_one():
    faults = [fault for seed in range(20) for fault in drawn(seed)]
    assert {fault.kind for fault in faults} == set(Kind)
    assert {fault.target for fault in faults} == {*TARGETS.processes, *TARGETS.links, "disk"}
    without = Targets(TARGETS.processes, TARGETS.servers, TARGETS.links, None)
    assert Kind.FULL not in {fault.kind for seed in range(20) for fault in drawn(seed, targets=without)}


@pytest.mark.parametrize("seed", range(20))
def test_only_servers_hang_for_good_and_in_time_to_be_replaced(seed):
    hangs = [fault for fault in drawn(seed) if fault.kind is Kind.HANG]
    assert all(fault.target in TARGETS.servers and fault.seconds == 0.0 for fault in hangs)
    assert all(fault.at_seconds + REPLACED_SECONDS < 1790 for fault in hangs)
    assert Kind.HANG not in {fault.kind for fault in drawn(seed, seconds=65.0, every=2.0)}
