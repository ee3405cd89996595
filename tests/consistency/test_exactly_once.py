"""(worker, sequence) names a push, and positions only rise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.spec import Consistency, StalePolicy
from ps_server.consistency import LIMIT, ParticipantStatus, Position, Verdict

from .job import ASYNC, SYNC, Job, at, backup, ssp, stale

MODES = [ASYNC, ssp(3), SYNC, backup(1), stale(StalePolicy.REJECT, 0)]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_repeated_push_changes_nothing(mode: Consistency) -> None:
    job = Job(mode)
    push = job.info(0, 1)
    job.tracker.push(push)
    taken, version, clocks = job.rounds(), job.tracker.version, job.tracker.clocks()
    assert job.tracker.push(push).verdict is Verdict.DUPLICATE
    assert job.tracker.push(replace(push, position=at(9))).verdict is Verdict.DUPLICATE
    assert (job.rounds(), job.tracker.version, job.tracker.clocks()) == ([], version, clocks)
    assert job.tracker.counts.outcomes["duplicate"] == 2
    assert job.tracker.counts.outcomes["applied"] == version == (mode != SYNC)
    assert len(taken) == (mode == backup(1))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_repeated_push_is_known_after_the_stream_opened_again(mode: Consistency) -> None:
    job = Job(mode)
    push = job.info(0, 1)
    job.tracker.push(push)
    job.tracker.attach(job.key(0), 0)
    assert job.tracker.push(push).verdict is Verdict.DUPLICATE


def test_gaps_in_the_sequence_are_fine_and_numbers_in_them_are_duplicates_afterwards() -> None:
    job = Job(ASYNC)
    job.tracker.push(replace(job.info(0, 1), sequence=5))
    assert job.tracker.last_sequence(job.key(0)) == 5
    assert job.tracker.push(replace(job.info(0, 2), sequence=4)).verdict is Verdict.DUPLICATE
    assert job.tracker.push(replace(job.info(0, 2), sequence=9)).verdict is Verdict.APPLY


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_push_that_does_not_move_the_clock_on_is_refused_and_changes_nothing(mode: Consistency) -> None:
    job = Job(mode)
    job.push(0, 3)
    job.rounds()
    before = job.tracker.clocks(), job.tracker.version, dict(job.tracker.counts.outcomes)
    for position in (at(3), at(2), Position(1, 0)):
        with pytest.raises(InvalidRequest, match="expected: a position above step 3"):
            job.tracker.push(replace(job.info(0, 1), position=position))
    assert (job.tracker.clocks(), job.tracker.version, job.tracker.counts.outcomes) == before
    assert job.push(0, 4).verdict is not Verdict.DUPLICATE


def test_each_worker_has_its_own_sequence() -> None:
    job = Job(ASYNC)
    assert [job.push(rank, 1).verdict for rank in (0, 1)] == [Verdict.APPLY, Verdict.APPLY]
    assert job.tracker.clocks() == (ParticipantStatus(job.key(0), at(1), 1), ParticipantStatus(job.key(1), at(1), 1))


@pytest.mark.parametrize("number", [LIMIT, (1 << 64) - 1])
@pytest.mark.parametrize("field", ["phase", "clock", "sequence"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_push_at_a_position_out_of_range_is_refused_and_leaves_room_for_all_others(
    mode: Consistency, field: str, number: int
) -> None:
    job = Job(mode)
    before = job.tracker.persisted_state(), job.tracker.clocks()
    push = job.info(0, number if field == "clock" else 1, number if field == "phase" else 0)
    with pytest.raises(InvalidRequest, match="names a position that is out of range"):
        job.tracker.push(replace(push, sequence=number) if field == "sequence" else push)
    if field != "sequence":
        with pytest.raises(InvalidRequest, match="is out of range"):
            job.tracker.attach(job.key(0), push.position.phase, push.position.clock)
    assert (job.tracker.persisted_state(), job.tracker.clocks()) == before
