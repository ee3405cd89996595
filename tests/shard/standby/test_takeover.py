"""A shard is lost and its standby takes its place: workers go on, and end with the bits of an undisturbed run."""

from __future__ import annotations

import signal
import time

import pytest

from ps_protocol.cluster.job_state import ailments, current_members, state_of
from ps_protocol.cluster.view import Role
from ps_protocol.launch.ports import free_port
from tests.recovery.reference import alone, assert_each_push_was_applied_once, counts_of, replayed
from tests.recovery.scripts import STEPS
from tests.support.length import choose, few
from tests.support.seeds import seeded
from tests.support.shards import wait_until


def assert_undisturbed(worker, steps=STEPS):
    assert worker.read("digest") == f"digest {alone(steps)}"
    assert worker.wait() == 0


@pytest.mark.parametrize("transport", few(["shm", "grpc", "bulk"]))
def test_the_standby_of_a_killed_shard_takes_its_place(pair, transport):
    made = pair("--acknowledge", "after")
    worker = made.cluster.worker(transport=transport)
    worker.read("step 7")
    made.first.kill()
    killed_at = time.monotonic()
    made.wait_for(made.second)
    print(f"the standby held the place {time.monotonic() - killed_at:.2f} s after the kill")
    wait_until(lambda: state_of(current_members(made.cluster.status(), Role.STANDBY)[0]) == "took over")
    assert not [said for said in ailments(made.cluster.status()) if "standby" in said]
    assert_undisturbed(worker)


@pytest.mark.early
def test_no_acknowledged_push_is_lost_whenever_the_primary_is_killed(pair):
    chance = seeded()
    made = pair("--acknowledge", "after")
    pauses = list(range(30, choose(180, 90), 30))
    steps = pauses[-1] + 30
    worker = made.cluster.worker(steps=steps, pauses=pauses)
    primary, standby = made.first, made.second
    for takeovers, pause in enumerate(pauses):
        worker.read(f"step {pause}")
        made.wait_until_covered(takeovers + 1)
        worker.tell()
        worker.read(f"step {pause + chance.randrange(1, 20)}")
        primary.kill()  # while it takes pushes
        killed_at = time.monotonic()
        made.wait_for(standby)
        print(f"the standby held the place {time.monotonic() - killed_at:.2f} s after the kill")
        primary.start()
        primary, standby = standby, primary
    assert_undisturbed(worker, steps=steps)


def test_with_pushes_acknowledged_before_replication_what_the_standby_has_is_not_lost(pair):
    made = pair("--acknowledge", "before")
    worker = made.cluster.worker(pauses=[9])
    worker.read("step 9")
    made.wait_until_held(made.second, 11)
    made.first.kill()
    made.wait_for(made.second)
    worker.tell()
    assert_undisturbed(worker)


def test_a_primary_that_is_told_to_stop_hands_over_whatever_it_has_acknowledged(pair):
    made = pair("--acknowledge", "before")
    worker = made.cluster.worker(steps=120)
    worker.read("step 20")
    made.first.send(signal.SIGTERM)
    assert made.first.wait() == 0
    made.wait_for(made.second)
    assert_undisturbed(worker, steps=120)


def test_a_primary_that_comes_back_follows_and_takes_over_again(pair):
    made = pair("--acknowledge", "after")
    worker = made.cluster.worker(pauses=[5, 12])
    worker.read("step 5")
    made.first.kill()
    made.wait_for(made.second)
    made.first.start()
    made.wait_until_covered(2)
    worker.tell()
    worker.read("step 12")
    made.second.kill()
    made.wait_for(made.first)
    worker.tell()
    assert_undisturbed(worker)
    assert replayed(made.first_data)["model"] == alone(STEPS)


def test_a_primary_started_again_before_its_lease_ends_keeps_its_place(pair):
    made = pair("--acknowledge", "after", lease_seconds=20.0)
    worker = made.cluster.worker(pauses=[5])
    worker.read("step 5")
    made.first.kill()
    made.first.start()
    made.wait_for(made.first)
    made.wait_until_covered(2)
    worker.tell()
    assert_undisturbed(worker)


@pytest.mark.parametrize("transport", few(["bulk", "shm", "grpc"]))
def test_a_frozen_primary_is_refused_when_it_wakes_and_follows(pair, transport):
    made = pair("--acknowledge", "after")
    worker = made.cluster.worker(pauses=[8], transport=transport)
    worker.read("step 8")
    made.first.send(signal.SIGSTOP)
    worker.tell()
    made.wait_for(made.second)
    # The worker waits for an answer of the frozen one, whose connections are open.
    worker.read("step 9")
    made.first.send(signal.SIGCONT)
    assert_undisturbed(worker)
    made.wait_until_covered(2)
    assert "starts over as a standby" in made.first.said


def test_a_frozen_standby_holds_the_workers_up_until_its_lease_ends(pair):
    made = pair("--acknowledge", "after")
    worker = made.cluster.worker(pauses=[8])
    worker.read("step 8")
    made.second.send(signal.SIGSTOP)
    worker.tell()
    assert_undisturbed(worker)
    # It lacks pushes that were acknowledged: nobody takes the place.
    made.first.kill()
    made.second.send(signal.SIGCONT)
    wait_until(lambda: "may lack pushes to shard 0 that were acknowledged" in made.second.said)
    assert made.holder is None
    # With the one that has them, everything is there.
    made.first.start()
    made.wait_for(made.first)
    made.wait_until_covered(2)
    assert replayed(made.first_data)["model"] == alone(STEPS)


def test_after_everything_was_killed_the_one_that_held_the_place_takes_it_again(pair):
    made = pair("--acknowledge", "after")
    worker = made.cluster.worker(pauses=[12])
    worker.read("step 12")
    for program in (made.cluster.coordinator, made.first, made.second, worker):
        program.kill()
    made.cluster.coordinator.start()
    for program in (made.second, made.first):
        program.launch()
    wait_until(lambda: made.holder is not None)
    again = made.cluster.worker()
    assert again.number("started") == 12
    assert_undisturbed(again)


def test_a_second_standby_waits_until_the_first_is_lost(pair):
    made = pair()
    third = made.cluster.shard(0, "--standby", name="third", data=made.cluster.folder / "data-third")
    third.launch()
    wait_until(lambda: "standby 0 exists already" in third.said)
    made.second.kill()
    made.wait_until_covered(2)
    assert sorted(made.cluster.status().view.live(Role.STANDBY)) == [0]


def test_each_push_of_several_workers_is_applied_once_on_both_sides_of_a_takeover(pair):
    made = pair("--acknowledge", "after")
    workers = [made.cluster.worker(rank, tag=rank, stays=True, steps=60) for rank in range(2)]
    workers[0].read("step 20")
    made.first.kill()
    made.wait_for(made.second)
    made.first.start()
    for worker in workers:
        worker.read("stays")
    workers[0].tell()
    workers[0].read("digest")
    assert_each_push_was_applied_once(counts_of(workers[0].read("ledger")), workers)


def test_a_shard_that_lost_its_place_listens_on_its_port_again(pair):
    made = pair("--acknowledge", "after", first=("--port", str(free_port())))
    worker = made.cluster.worker(pauses=[8])
    worker.read("step 8")
    made.first.send(signal.SIGSTOP)
    made.wait_for(made.second)
    made.first.send(signal.SIGCONT)
    made.wait_until_covered(2)
    made.second.kill()
    made.wait_for(made.first)
    worker.tell()
    assert_undisturbed(worker)
