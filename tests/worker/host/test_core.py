"""The rounds of one host: whom the leader waits for, who is in a round, who pushes by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_worker.host.core import HOLD_SECONDS, Dismiss, HostRounds, Lead, Tell
from ps_worker.host.messages import FOREVER, Deposit, HostWorker, RoundAnswer, Separate
from tests.support.length import choose
from tests.support.seeds import seeded

ONE, TWO = HostWorker(1, 11), HostWorker(2, 12)
LIVE = {0: 10, 1: 11, 2: 12}
ANSWER = RoundAnswer(0.0, "", ())


def deposit(clock: int, phase: int = 0) -> Deposit:
    return Deposit(clock, phase, clock, 1, 1.0, False, False, (), (), (), "")


def lead(clock: int, mode: str = "sync", patience: float | None = None, phase: int = 0) -> Lead:
    return Lead((phase, clock), mode == "sync", mode != "async", patience, patience, (phase, clock - 1))


def joined(*workers: HostWorker) -> HostRounds:
    rounds = HostRounds()
    for worker in workers:
        assert rounds.join(worker, 1) == []
    return rounds


def separated(commands) -> list[HostWorker]:
    assert all(isinstance(each, Tell) and isinstance(each.message, Separate) for each in commands)
    return [each.worker for each in commands]


def test_a_round_has_the_deposits_of_all_who_are_connected_by_rank():
    rounds = joined(TWO, ONE)
    assert rounds.deposit(TWO, deposit(1), 0.0) == []
    assert rounds.lead(lead(1), 0.0) == []
    assert not rounds.is_complete
    assert rounds.waits_for == [ONE]
    assert rounds.deposit(ONE, deposit(1), 1.0) == []
    assert rounds.is_complete
    assert list(rounds.taken) == [ONE, TWO]
    assert rounds.answered(ANSWER) == [Tell(ONE, ANSWER), Tell(TWO, ANSWER)]
    assert not rounds.is_complete


def test_a_leader_alone_waits_for_nobody():
    rounds = joined()
    rounds.lead(lead(1), 0.0)
    assert rounds.is_complete
    assert not rounds.taken


def test_in_sync_a_deposit_of_another_step_is_pushed_separately_and_not_waited_for():
    rounds = joined(ONE)
    rounds.deposit(ONE, deposit(3), 0.0)
    assert separated(rounds.lead(lead(4), 0.0)) == [ONE]
    # It may wait on the shards for this leader's push of step 4, once it has made its own.
    assert not rounds.is_complete
    assert separated(rounds.deposit(ONE, deposit(5), 0.0)) == [ONE]
    assert rounds.is_complete


def test_in_async_a_round_may_have_different_steps_and_in_ssp_it_has_not():
    rounds = joined(ONE)
    rounds.deposit(ONE, deposit(3), 0.0)
    assert rounds.lead(lead(9, "async"), 0.0) == []
    assert list(rounds.taken) == [ONE]
    rounds = joined(ONE)
    rounds.deposit(ONE, deposit(3), 0.0)
    assert separated(rounds.lead(lead(9, "ssp"), 0.0)) == [ONE]
    assert rounds.is_complete


def test_in_sync_who_pushed_this_step_by_itself_is_not_waited_for():
    rounds = joined(ONE)
    rounds.leave_until((0, 4))
    assert separated(rounds.deposit(ONE, deposit(3), 0.0)) == [ONE]
    rounds.lead(lead(3), 0.0)
    assert rounds.is_complete
    rounds.ended()
    rounds.lead(lead(4), 0.0)
    assert rounds.waits_for == [ONE]


def test_in_sync_who_waits_for_a_push_of_the_leader_that_has_failed_is_not_waited_for():
    rounds = joined(ONE)
    rounds.leave_until((0, 2))
    rounds.deposit(ONE, deposit(1), 0.0)  # it pushes by itself, and waits for the leader's first push
    rounds.lead(replace(lead(2), reached=(0, 0)), 0.0)
    assert rounds.is_complete
    assert not rounds.taken
    rounds.ended()
    rounds.away(ONE, (0, 3))  # it makes the second one by itself, for its part
    rounds.lead(replace(lead(3), reached=(0, 1)), 0.0)
    assert rounds.is_complete
    rounds.ended()
    rounds.lead(replace(lead(3), reached=(0, 2)), 0.0)
    assert rounds.waits_for == [ONE]


def test_in_ssp_who_pushes_by_itself_is_not_waited_for_until_it_comes_back():
    rounds = joined(ONE)
    rounds.leave_until()
    rounds.deposit(ONE, deposit(3), 0.0)
    rounds.lead(lead(9, "ssp"), 0.0)
    assert rounds.is_complete
    rounds.ended()
    rounds.deposit(ONE, deposit(10), 0.0)
    rounds.lead(lead(10, "ssp"), 0.0)
    assert list(rounds.taken) == [ONE]
    rounds.answered(ANSWER)
    rounds.lead(lead(11, "ssp"), 0.0)
    assert rounds.waits_for == [ONE]


def test_in_sync_a_deposit_for_the_step_under_way_is_pushed_separately_and_one_for_the_next_is_kept():
    rounds = joined(ONE)
    rounds.away(ONE, FOREVER)
    rounds.lead(lead(1), 0.0)
    assert rounds.is_complete
    assert separated(rounds.deposit(ONE, deposit(1), 0.0)) == [ONE]
    assert rounds.deposit(ONE, deposit(2), 0.0) == []
    assert rounds.tick(9.0, LIVE, 1) == []
    rounds.ended()
    rounds.lead(lead(2), 9.0)
    assert list(rounds.taken) == [ONE]


def test_in_async_a_deposit_waits_for_the_exchange_under_way():
    rounds = joined(ONE)
    rounds.away(ONE, FOREVER)
    rounds.lead(lead(1, "async"), 0.0)
    assert rounds.deposit(ONE, deposit(1), 0.0) == []
    assert rounds.tick(9.0, LIVE, 1) == []


def test_a_deposit_does_not_wait_for_an_exchange_that_began_in_async_and_may_wait_for_it_by_now():
    rounds = joined(ONE)
    rounds.away(ONE, FOREVER)
    rounds.lead(lead(1, "async"), 0.0)
    rounds.deposit(ONE, deposit(1), 0.0)
    assert separated(rounds.tick(9.0, LIVE, 1, bounded=True)) == [ONE]


def test_in_ssp_a_deposit_waits_a_moment_for_the_exchange_under_way_which_may_wait_for_it():
    rounds = joined(ONE)
    rounds.away(ONE, FOREVER)
    rounds.lead(lead(1, "ssp"), 0.0)
    assert rounds.deposit(ONE, deposit(1), 5.0) == []
    assert rounds.tick(5.0 + HOLD_SECONDS / 2, LIVE, 1) == []
    assert separated(rounds.tick(5.0 + HOLD_SECONDS, LIVE, 1)) == [ONE]


def test_a_worker_in_a_barrier_is_waited_for_in_the_next_phase():
    rounds = joined(ONE)
    rounds.away(ONE, (1, 0))
    rounds.lead(lead(7), 0.0)
    assert rounds.is_complete
    rounds.ended()
    rounds.lead(lead(1, phase=1), 0.0)
    assert rounds.waits_for == [ONE]


def test_while_the_leader_is_in_a_barrier_the_steps_before_it_are_pushed_separately():
    rounds = joined(ONE, TWO)
    rounds.deposit(ONE, deposit(7), 0.0)
    assert separated(rounds.leave_until((1, 0))) == [ONE]
    assert separated(rounds.deposit(TWO, deposit(8), 0.0)) == [TWO]
    assert rounds.deposit(ONE, deposit(1, phase=1), 0.0) == []


def test_who_ends_is_not_waited_for_and_told_nothing_where_it_connects_again():
    rounds = joined(ONE, TWO)
    rounds.deposit(ONE, deposit(1), 0.0)
    rounds.lead(lead(1), 0.0)
    rounds.gone(TWO)
    assert rounds.is_complete
    rounds.gone(ONE)
    rounds.join(ONE, 1)
    assert rounds.deposit(ONE, deposit(2), 0.0) == []
    assert rounds.answered(ANSWER) == []
    assert rounds.pending == [ONE]


def test_who_is_no_member_any_more_is_not_waited_for_but_one_that_the_view_does_not_know_yet_is():
    rounds = joined(ONE)
    rounds.join(TWO, 5)
    rounds.lead(lead(1), 0.0)
    assert rounds.tick(1.0, {0: 10}, 4) == [Dismiss(ONE, "it is no member of the job any more")]
    assert rounds.waits_for == [TWO]
    assert [each.worker for each in rounds.tick(1.0, {0: 10}, 5)] == [TWO]
    assert rounds.is_complete


def test_who_sends_nothing_for_a_lease_is_named_and_the_others_go_on():
    rounds = joined(ONE)
    rounds.lead(lead(1, "async", 3.0), 10.0)
    assert rounds.tick(12.9, LIVE, 1) == []
    assert rounds.tick(13.0, LIVE, 1) == [Dismiss(ONE, "it has sent nothing for 3 s")]
    assert rounds.is_complete


def test_in_lockstep_a_live_worker_is_waited_for_however_long_it_takes():
    rounds = joined(ONE)
    rounds.lead(lead(1), 0.0)
    assert rounds.tick(1e6, LIVE, 1) == []
    assert not rounds.is_complete


def test_before_the_first_step_workers_are_waited_for_that_have_not_connected():
    rounds = HostRounds(expected={ONE, TWO})
    rounds.lead(lead(1, "async", 3.0), 0.0)
    rounds.join(ONE, 1)
    rounds.deposit(ONE, deposit(1), 0.0)
    assert rounds.waits_for == [TWO]
    rounds.tick(3.0, LIVE, 1)
    assert rounds.is_complete
    rounds.ended()
    rounds.deposit(ONE, deposit(2), 0.0)
    rounds.lead(lead(2, "async", 3.0), 0.0)
    assert rounds.is_complete


def test_a_round_that_fails_is_pushed_separately_by_all_of_it():
    rounds = joined(ONE, TWO)
    rounds.deposit(ONE, deposit(1), 0.0)
    rounds.deposit(TWO, deposit(1), 0.0)
    rounds.lead(lead(1), 0.0)
    assert separated(rounds.dissolve("no")) == [ONE, TWO]
    rounds.ended()
    # They are at this step; the leader may repeat it.
    rounds.lead(lead(1), 0.0)
    assert rounds.is_complete


def test_who_is_left_out_of_a_round_is_told_nothing_of_it():
    rounds = joined(ONE, TWO)
    rounds.deposit(ONE, deposit(1), 0.0)
    rounds.deposit(TWO, deposit(1), 0.0)
    rounds.lead(lead(1), 0.0)
    rounds.without([ONE])
    assert rounds.answered(ANSWER) == [Tell(TWO, ANSWER)]


def test_a_worker_that_connects_again_takes_the_place_of_its_last_connection():
    rounds = joined(ONE)
    later = HostWorker(1, 20)
    assert rounds.join(later, 1) == [Dismiss(ONE, "it connected again")]
    rounds.lead(lead(1), 0.0)
    assert rounds.waits_for == [later]


def test_where_workers_wait_for_each_other_in_two_models_one_of_them_pushes_by_itself():
    here, there = joined(ONE), joined(ONE)
    there.deposit(ONE, deposit(5), 0.0)
    here.lead(lead(6), 0.0)
    assert set(here.waits_for) & set(there.pending) == {ONE}
    assert separated(there.separate(ONE, "blocked")) == [ONE]
    here.blocked(ONE)
    assert here.is_complete


def test_a_deposit_waits_a_moment_for_a_leader_that_waits_in_another_model():
    here, there = joined(), joined(ONE)
    there.deposit(ONE, deposit(5), 0.0)
    here.lead(lead(6), 0.0)
    assert here.may_wait
    assert there.release(HOLD_SECONDS / 2) == []
    assert separated(there.release(HOLD_SECONDS)) == [ONE]


@pytest.mark.parametrize("mode", ["sync", "ssp", "async"])
def test_whatever_happens_each_deposit_is_answered_or_separated_once_or_its_connection_ends(mode):
    chance = seeded()
    for _ in range(choose(300, 60)):
        rounds, waiting, clock, now = HostRounds(), {}, 0, 0.0
        connected: set[HostWorker] = set()

        def heard(commands, waiting=waiting, connected=connected):
            for each in commands:
                if isinstance(each, Dismiss):
                    waiting.pop(each.worker, None)
                    connected.discard(each.worker)
                else:
                    assert waiting.pop(each.worker, None) is not None, f"{each} without a deposit"

        for _ in range(60):
            now += chance.random()
            worker = chance.choice([ONE, TWO, HostWorker(3, 13)])
            match chance.choice(["join", "deposit", "deposit", "away", "gone", "lead", "tick", "end", "end", "leave"]):
                case "join" if worker not in connected:
                    heard(rounds.join(worker, 1))
                    connected.add(worker)
                case "deposit" if worker in connected and worker not in waiting:
                    waiting[worker] = True
                    heard(rounds.deposit(worker, deposit(max(1, clock + chance.choice([-1, 0, 1]))), now))
                case "away" if worker in connected and worker not in waiting:
                    heard(rounds.away(worker, chance.choice([FOREVER, (0, clock + 1)])))
                case "gone" if worker in connected:
                    connected.discard(worker)
                    waiting.pop(worker, None)
                    heard(rounds.gone(worker))
                case "lead" if not rounds.is_complete and not rounds.waits_for:
                    clock += 1
                    heard(rounds.lead(lead(clock, mode, 5.0), now))
                case "tick":
                    heard(rounds.tick(now, {**LIVE, 3: 13}, 1))
                case "end" if rounds.is_complete:
                    if chance.random() < 0.3:
                        heard(rounds.dissolve("no"))
                        rounds.ended()
                    else:
                        heard(rounds.answered(ANSWER))
                case "leave" if not rounds.is_complete and not rounds.waits_for:
                    heard(rounds.leave_until(chance.choice([FOREVER, (0, clock + 1)])))
                case _:
                    pass
        assert {*rounds.taken, *rounds.pending} == set(waiting)
