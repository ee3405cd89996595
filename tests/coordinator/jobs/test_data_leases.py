"""Ranges of a dataset are leased, finished, given back and handed out again by rules without time or I/O."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ps_protocol.cluster.leases import LeaseAnswer, LeaseAsk, Span
from ps_protocol.errors import Fenced, InvalidRequest
from ps_server.coordinator.data_leases import DataLeases

LENGTH = 100


class Worker:
    """One incarnation that asks for leases of 10 items."""

    def __init__(self, leases: DataLeases, rank: int, incarnation: int, length: int = LENGTH) -> None:
        self.leases, self.rank, self.incarnation, self.length = leases, rank, incarnation, length
        self.sequence = 0

    def ask(self, *trained: tuple[int, int], **changes: Any) -> LeaseAsk:
        self.sequence += 1
        fields = {"dataset": "data", "epoch": 0, "lease_items": 10, "sequence": self.sequence, **changes}
        return LeaseAsk(length=self.length, trained=tuple(Span(*span) for span in trained), **fields)

    def tell(self, ask: LeaseAsk) -> LeaseAnswer:
        return self.leases.lease(self.rank, self.incarnation, ask).value

    def lease(self, *trained: tuple[int, int], **changes: Any) -> LeaseAnswer:
        return self.tell(self.ask(*trained, **changes))

    def give_back(self, *trained: tuple[int, int]) -> None:
        self.lease(*trained, lease_items=0)


@pytest.fixture
def leases() -> DataLeases:
    leases = DataLeases()
    leases.members({0: 100, 1: 101})
    return leases


@pytest.fixture
def first(leases: DataLeases) -> Worker:
    return Worker(leases, 0, 100)


@pytest.fixture
def second(leases: DataLeases) -> Worker:
    return Worker(leases, 1, 101)


def test_workers_get_different_ranges_lowest_first(first: Worker, second: Worker) -> None:
    assert [w.lease().span for w in (first, second, first)] == [Span(0, 10), Span(10, 20), Span(20, 30)]


def test_the_last_range_is_as_short_as_what_is_left(first: Worker) -> None:
    assert first.lease(lease_items=95).span == Span(0, 95)
    assert first.lease().span == Span(95, 100)


def test_an_epoch_is_done_when_all_of_it_was_reported_and_not_when_it_was_leased(first: Worker, second: Worker) -> None:
    first.lease(lease_items=60), second.lease(lease_items=60)
    assert first.lease((0, 60)) == LeaseAnswer(epoch=0, holders=(1,))
    assert not second.lease((60, 99)).done
    assert second.lease((99, 100)).done
    assert first.lease().done


def test_epochs_that_were_finished_are_done_at_once_for_who_joins(first: Worker, second: Worker) -> None:
    for epoch in range(3):
        first.lease(epoch=epoch, lease_items=LENGTH)
        assert first.lease((0, LENGTH), epoch=epoch, trained_epoch=epoch).done
    assert [second.lease(epoch=epoch).done for epoch in range(4)] == [True, True, True, False]


def test_who_is_an_epoch_ahead_gets_what_the_earlier_one_has_left_first(first: Worker, second: Worker) -> None:
    first.lease(lease_items=90)
    assert first.lease((0, 90), epoch=1) == LeaseAnswer(Span(90, 100), 0)
    assert first.lease((90, 100), epoch=1) == LeaseAnswer(Span(0, 10), 1)
    assert second.lease(epoch=0).done


def test_what_is_given_back_is_leased_again_without_the_part_that_was_trained(first: Worker, second: Worker) -> None:
    first.lease()
    first.give_back((0, 4))
    assert second.lease().span == Span(4, 14)


@pytest.mark.parametrize("live", [{1: 101}, {0: 102, 1: 101}], ids=["gone", "replaced"])
def test_a_lost_worker_loses_its_leases_and_is_refused(
    leases: DataLeases, first: Worker, second: Worker, live: dict[int, int]
) -> None:
    first.lease()
    assert "10 items of 'data' that worker 0 held are free" in leases.members(live).reason
    assert second.lease().span == Span(0, 10)
    with pytest.raises(Fenced, match="worker 0"):
        first.lease((0, 10))


def test_a_join_of_another_worker_changes_no_lease(leases: DataLeases, first: Worker, second: Worker) -> None:
    first.lease()
    assert leases.members({0: 100, 1: 101, 2: 102}).reason == ""
    assert second.lease().span == Span(10, 20)


def test_a_repeated_report_counts_once_also_when_it_ended_the_epoch(first: Worker) -> None:
    first.lease(lease_items=LENGTH)
    ask = first.ask((0, LENGTH))
    assert [first.tell(ask).done for _ in range(2)] == [True, True]
    assert first.lease(epoch=1).epoch == 1


def test_a_request_that_was_overtaken_is_refused(first: Worker) -> None:
    late = first.ask()
    first.lease()
    with pytest.raises(InvalidRequest, match="old sequence"):
        first.tell(late)


def test_a_request_that_comes_after_its_repetition_was_answered_keeps_no_item_from_others(
    first: Worker, second: Worker
) -> None:
    """The repetition was answered with nothing to lease; what the late one gets, nobody hears of."""
    first.lease(lease_items=LENGTH)
    late = second.ask(held=())
    assert second.tell(late) == LeaseAnswer(epoch=0, holders=(0,))
    first.give_back((0, 90))
    assert second.tell(late).span == Span(90, 100)
    assert first.lease(held=()).span is None
    assert second.lease(held=()).span == Span(90, 100)
    assert second.lease((90, 100), held=()).done


def test_what_a_worker_does_not_hold_is_free_again_and_may_go_to_another(
    leases: DataLeases, first: Worker, second: Worker
) -> None:
    first.lease(), first.lease()
    decision = leases.lease(0, 100, first.ask((0, 4), lease_items=1, batch_items=0, held=(Span(4, 6), Span(10, 20))))
    assert decision.reason == "4 items of 'data' are free again: worker 0 did not hear of them"
    assert decision.value.span == Span(6, 7)
    assert second.lease().span == Span(7, 10)
    assert second.lease().span == Span(20, 30)


@pytest.mark.parametrize(
    ("said", "again"),
    [
        ({}, False),
        ({"held": (Span(0, 10),)}, False),
        ({"held": (Span(0, LENGTH), Span(50, 60))}, False),
        ({"held": ()}, True),
        ({"held": (Span(40, 60),)}, True),
        ({"held": (Span(0, 10),), "trained_epoch": 7}, True),
    ],
    ids=["nothing", "it", "more than it", "none", "another's", "of another epoch"],
)
def test_what_is_leased_stays_as_far_as_the_worker_names_it_or_does_not_say(
    first: Worker, second: Worker, said: dict[str, Any], again: bool
) -> None:
    first.lease()
    second.lease(lease_items=LENGTH)
    assert first.lease(**said).span == (Span(0, 10) if again else None)


def test_who_names_what_others_hold_or_what_is_free_gets_nothing_by_it(
    leases: DataLeases, first: Worker, second: Worker
) -> None:
    first.lease(), second.lease()
    before = leases.persisted_state()["data"]
    first.lease(lease_items=0, held=(Span(0, LENGTH),))
    first.lease(held=(Span(0, LENGTH),))
    assert second.lease((10, 20)).span == Span(20, 30)
    assert leases.persisted_state()["data"]["holders"]["0"]["leased"] == before["holders"]["0"]["leased"]


def test_a_repetition_says_no_more_what_its_worker_holds(first: Worker, second: Worker) -> None:
    """Its answer may have come meanwhile, and is what a request that the network held up does not name."""
    late = first.ask(held=())
    assert [first.tell(late).span for _ in range(2)] == [Span(0, 10)] * 2
    assert second.lease().span == Span(10, 20)
    assert first.lease((0, 10), held=()).span == Span(20, 30)


def test_what_ended_an_epoch_and_what_is_held_may_overlap(first: Worker) -> None:
    first.lease(lease_items=LENGTH)
    assert first.lease((0, LENGTH), held=(Span(0, LENGTH),), epoch=1).span == Span(0, 10)
    assert first.lease(held=(Span(0, LENGTH),), epoch=1).span == Span(0, 10)


def test_a_parked_request_gets_a_range_when_there_is_one(first: Worker, second: Worker) -> None:
    first.lease(lease_items=LENGTH)
    parked = second.ask()
    assert second.tell(parked).span is None
    first.give_back((0, 30))
    assert second.tell(parked).span == Span(30, 40)


@pytest.mark.parametrize("span", [(10, 12), (8, 12), (50, 60)], ids=["another's", "partly another's", "free"])
def test_reporting_what_one_does_not_hold_is_refused_and_changes_nothing(
    leases: DataLeases, first: Worker, second: Worker, span: tuple[int, int]
) -> None:
    first.lease(), second.lease()
    before = leases.persisted_state()
    with pytest.raises(Fenced, match="not leased to it"):
        first.lease((0, 5), span)
    with pytest.raises(Fenced, match="not leased to it"):
        first.lease((0, 5), trained_epoch=7)
    assert leases.persisted_state() == before


@pytest.mark.parametrize("span", [(-1, 5), (5, 5), (95, 101)])
def test_a_range_outside_of_the_dataset_is_refused(first: Worker, span: tuple[int, int]) -> None:
    first.lease()
    before = first.leases.persisted_state()
    with pytest.raises(InvalidRequest, match="not a range"):
        first.lease(span)
    with pytest.raises(InvalidRequest, match="not a range"):
        first.lease(held=(Span(*span),))
    assert first.leases.persisted_state() == before


def test_another_length_under_the_same_name_is_refused_and_names_both(leases: DataLeases, first: Worker) -> None:
    first.lease()
    with pytest.raises(InvalidRequest, match=r"100 items.*99 items.*name="):
        Worker(leases, 1, 101, length=99).lease()


@pytest.mark.parametrize("changes", [{"dataset": ""}, {"sequence": 0}])
def test_a_request_without_name_or_sequence_is_refused(first: Worker, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="name and a sequence"):
        first.lease(**changes)


def test_a_length_beyond_all_data_is_refused(leases: DataLeases) -> None:
    with pytest.raises(InvalidRequest, match="too long"):
        Worker(leases, 0, 100, length=1 << 64).lease()


def test_an_empty_dataset_is_done_in_every_epoch(leases: DataLeases) -> None:
    empty = Worker(leases, 0, 100, length=0)
    assert [empty.lease(epoch=epoch).done for epoch in range(2)] == [True, True]


def test_datasets_are_apart(first: Worker) -> None:
    assert [first.lease(dataset=name).span for name in ("data", "test")] == [Span(0, 10), Span(0, 10)]


def test_persisted_state_survives_json(leases: DataLeases, first: Worker, second: Worker) -> None:
    first.lease(), second.lease()
    unanswered = first.ask((0, 7))
    span = first.tell(unanswered).span
    restored = DataLeases.restore(json.loads(json.dumps(leases.persisted_state())))
    assert restored.persisted_state() == leases.persisted_state()
    restored.members({0: 100})
    first.leases = restored
    assert first.tell(unanswered).span == span
    assert first.lease((7, 10)).span == Span(10, 20)


def test_memory_does_not_grow_with_requests_and_lives(leases: DataLeases) -> None:
    sizes = set()
    for epoch in range(20):
        worker = Worker(leases, epoch % 3, 1000 + epoch)
        leases.members({worker.rank: worker.incarnation})
        span = worker.lease(epoch=epoch, lease_items=7).span
        while span is not None:
            report = (span.begin, span.end)
            span = worker.lease(report, epoch=epoch, trained_epoch=epoch, lease_items=7).span
        plain = leases.persisted_state()["data"]
        sizes.add((len(plain["free"]), len(plain["holders"])))
    assert sizes == {(1, 1)}


@pytest.mark.parametrize(("given_back_from", "ranges"), [(3, [(3, 10), (10, 20)]), (10, [(10, 20), (20, 30)])])
def test_ranges_of_whole_batches_end_at_their_borders_whatever_was_given_back(
    leases: DataLeases, first: Worker, second: Worker, given_back_from: int, ranges: list[tuple[int, int]]
) -> None:
    first.lease(batch_items=10)
    first.give_back((0, given_back_from))
    leases.members({1: 101})
    assert [second.lease(batch_items=10).span for _ in ranges] == [Span(*span) for span in ranges]


def test_a_worker_with_another_fingerprint_gets_the_one_that_is_kept_and_changes_nothing(
    leases: DataLeases, first: Worker, second: Worker
) -> None:
    first.lease(fingerprint="one")
    before = leases.persisted_state()
    other = Worker(leases, 1, 101, length=50)
    assert other.lease(fingerprint="other", batch_items=5) == LeaseAnswer(fingerprint="one")
    assert leases.persisted_state() == before
    again = DataLeases.restore(json.loads(json.dumps(before)))
    again.members({0: 100, 1: 101})
    assert Worker(again, 1, 101).lease(fingerprint="other").fingerprint == "one"
    assert second.lease(fingerprint="one").span == Span(10, 20)


@pytest.mark.parametrize(("kept", "given"), [("", "one"), ("one", "")])
def test_files_and_other_data_are_not_the_same_dataset(first: Worker, second: Worker, kept: str, given: str) -> None:
    first.lease(fingerprint=kept)
    with pytest.raises(InvalidRequest, match=r"another dataset under the name 'data'.*of files"):
        second.lease(fingerprint=given)


def test_a_fingerprint_has_a_limit(first: Worker) -> None:
    with pytest.raises(InvalidRequest, match="fingerprint of dataset 'data' is too long"):
        first.lease(fingerprint="x" * (1 << 16) + "y")


def test_leases_of_release_0_1_0_have_no_fingerprint(first: Worker, leases: DataLeases) -> None:
    first.lease()
    saved = leases.persisted_state()
    del saved["data"]["fingerprint"]
    again = DataLeases.restore(saved)
    again.members({0: 100})
    first.leases = again
    assert first.lease().span == Span(10, 20)
