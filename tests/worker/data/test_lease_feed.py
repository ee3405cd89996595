"""A feed of leases asks ahead, survives lost answers and an absent coordinator, and gives back what was not trained."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from ps_protocol.cluster.leases import LeaseAnswer, LeaseAsk, Span
from ps_protocol.errors import Fenced, PsError, Unavailable
from ps_server.coordinator.data_leases import DataLeases
from ps_worker.data.leased_loader import LeasedItems, LeaseFeed
from tests.support.shards import wait_until

LENGTH = 40


class Coordinator:
    """Real rules, called at once; answers are lost, or calls fail, as a test says."""

    def __init__(self) -> None:
        self.leases = DataLeases()
        self.leases.members({0: 1, 1: 2})
        self.asks: list[LeaseAsk] = []
        self.lose_answers = 0
        self.error: PsError | None = None
        self._lock = threading.Lock()

    def call(self, rank: int) -> Callable[[LeaseAsk, float, float], LeaseAnswer]:
        def call(ask: LeaseAsk, wait_seconds: float, timeout_seconds: float) -> LeaseAnswer:
            with self._lock:
                if self.error is not None:
                    raise self.error
                self.asks.append(ask)
                answer = self.leases.lease(rank, rank + 1, ask).value
                if self.lose_answers:
                    self.lose_answers -= 1
                    raise Unavailable("the answer is lost")
            if answer.span is None and not answer.done:
                threading.Event().wait(min(wait_seconds, 0.01))
            return answer

        return call

    def late(self, rank: int, ask: LeaseAsk) -> LeaseAnswer:
        """``ask`` comes again, when nobody waits for the answer."""
        with self._lock:
            return self.leases.lease(rank, rank + 1, ask).value

    def leased(self, rank: int) -> list[list[int]]:
        with self._lock:
            return list(self.leases.persisted_state()["data"]["holders"][str(rank)]["leased"])

    @property
    def free(self) -> list[list[int]]:
        with self._lock:
            return list(self.leases.persisted_state()["data"]["free"])


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@contextmanager
def feeding(coordinator: Coordinator, rank: int = 0, epoch: int = 0, begin: int = 1) -> Iterator[LeaseFeed]:
    wish = LeaseAsk("data", LENGTH, epoch, 10, sequence=0)
    feed = LeaseFeed(coordinator.call(rank), wish, itertools.count(begin))
    yield feed
    feed.close()


def train_all(feed: LeaseFeed) -> list[Span]:
    spans = []
    while feed.wait(60) and not feed.done:
        while (span := feed.take()) is not None:
            feed.trained(span)
            spans.append(span)
    return spans


def test_everything_is_fed_in_order_and_then_the_epoch_is_done(coordinator: Coordinator) -> None:
    with feeding(coordinator) as feed:
        assert train_all(feed) == [Span(at, at + 10) for at in range(0, LENGTH, 10)]
        assert feed.done


def test_the_next_lease_is_fetched_while_the_first_is_in_use(coordinator: Coordinator) -> None:
    with feeding(coordinator) as feed:
        assert feed.take() == Span(0, 10)
        wait_until(lambda: coordinator.free == [[20, 40]])
        assert len(coordinator.asks) == 2


def test_a_lost_answer_is_asked_for_again_and_its_lease_is_not_lost(coordinator: Coordinator) -> None:
    coordinator.lose_answers = 2
    with feeding(coordinator) as feed:
        assert [span.begin for span in train_all(feed)] == [0, 10, 20, 30]
    assert [ask.sequence for ask in coordinator.asks[:4]] == [1, 1, 1, 2]


def test_each_request_names_what_the_worker_holds(coordinator: Coordinator) -> None:
    with feeding(coordinator) as feed:
        assert feed.take() == Span(0, 10)
        wait_until(lambda: len(coordinator.asks) == 2)
        feed.trained(Span(0, 4))
        assert feed.take() == Span(10, 20)
        wait_until(lambda: feed.ready)
    assert [ask.held for ask in coordinator.asks] == [(), (Span(0, 10),), (Span(4, 20),), (Span(4, 30),)]
    assert [ask.trained for ask in coordinator.asks] == [(), (), (Span(0, 4),), ()]


def test_what_a_request_gets_that_comes_after_its_repetition_was_answered_is_leased_again(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch waited for it for ever: the worker was told that it had itself the last items."""
    # No other request comes before the late one.
    monkeypatch.setattr("ps_worker.times.LEASE_SECONDS", 600.0)
    with feeding(coordinator, rank=1) as other:
        held = [other.take() for _ in range(4)]
        with feeding(coordinator, begin=100) as feed:
            assert feed.take() is None
            late = next(ask for ask in coordinator.asks if ask.sequence == 100)
            other.close()
            assert coordinator.late(0, late).span == Span(0, 10)
            assert train_all(feed) == held
            assert feed.done


def test_closing_reports_the_trained_part_and_gives_the_rest_back_once(coordinator: Coordinator) -> None:
    with feeding(coordinator) as feed:
        assert feed.take() == Span(0, 10)
        feed.trained(Span(0, 4))
        feed.close()
        feed.close()
        assert coordinator.free == [[4, 40]]
        assert sum(not ask.lease_items for ask in coordinator.asks) == 1


def test_what_is_at_hand_is_fed_while_the_coordinator_is_away(coordinator: Coordinator) -> None:
    with feeding(coordinator) as feed:
        assert feed.take() == Span(0, 10)
        wait_until(lambda: coordinator.free == [[20, 40]])
        coordinator.error = Unavailable("gone")
        assert feed.take() == Span(10, 20)
        assert feed.take() is None
        assert not feed.wait(0.05)
        assert feed.away is not None
        coordinator.error = None
        assert feed.wait(60)
        assert feed.take() == Span(20, 30)


def test_a_lost_place_is_raised_where_items_are_awaited(coordinator: Coordinator) -> None:
    coordinator.error = Fenced("worker 0 lost its place")
    with feeding(coordinator) as feed:
        with pytest.raises(Fenced):
            feed.wait(60)
        with pytest.raises(Fenced):
            feed.take()


def test_what_the_other_gives_back_comes_to_who_waits(coordinator: Coordinator) -> None:
    with feeding(coordinator) as first:
        held = [first.take()]
        wait_until(lambda: coordinator.free == [[20, 40]])
        # Each asks as soon as it begins.
        with feeding(coordinator, rank=1) as second:
            spans = [span for span in iter(second.take, None) if second.trained(span) is None]
            assert not second.wait(0.05)
            # The answer to the request that reports its last items.
            wait_until(lambda: second.holders == (0,))
            first.close()
            spans += train_all(second)
        assert held == [Span(0, 10)]
        assert sorted(p for span in spans for p in range(span.begin, span.end)) == list(range(LENGTH))


def test_a_report_waits_for_no_other_lease(coordinator: Coordinator) -> None:
    with feeding(coordinator, rank=1) as other, feeding(coordinator) as feed:
        other.take()
        wait_until(lambda: len(coordinator.asks) >= 3)
        while (span := feed.take()) is not None:
            feed.trained(span)
        feed.wait(0)
        wait_until(lambda: not coordinator.leased(0))
        assert coordinator.leased(1)


class Session:
    """What a worker's items need of it."""

    def __init__(self, coordinator: Coordinator, rank: int = 0) -> None:
        self.call = coordinator.call(rank)
        self.sequences = itertools.count(1)
        self.iterating: dict[str, Callable[[], None]] = {}
        self.stepped = 0
        self.termination = SimpleNamespace(section=nullcontext)

    def lease_data(self, ask: LeaseAsk, wait_seconds: float, timeout_seconds: float) -> LeaseAnswer:
        return self.call(ask, wait_seconds, timeout_seconds)


def test_what_could_not_be_reported_or_given_back_at_the_end_of_an_iteration_is_with_the_next(
    coordinator: Coordinator,
) -> None:
    """The epoch waited for ever: the worker did not know any more that it had the items."""
    session: Any = Session(coordinator)
    items = LeasedItems(LeaseAsk("data", LENGTH, 0, 10, 0), session, itertools.count())
    feed = items.begin()
    assert feed.take() == Span(0, 10)
    items.note(Span(0, 10))
    items.handed_out(4)
    wait_until(lambda: coordinator.free == [[20, 40]])
    coordinator.error = Unavailable("gone")
    items.trained(feed, 4)
    items.end()
    assert coordinator.free == [[20, 40]]
    coordinator.error = None
    again = items.begin()
    trained = train_all(again)
    assert [p for span in trained for p in range(span.begin, span.end)] == [*range(4, LENGTH), *range(LENGTH)]
    items.end()
    assert items.begin()
    items.end()
    assert coordinator.asks[-1].trained == ()


def test_an_iteration_ends_when_another_loader_of_the_same_name_begins_one(coordinator: Coordinator) -> None:
    """The worker says what it holds: what only the first iteration has would not be among that."""
    session: Any = Session(coordinator)
    first, second = (LeasedItems(LeaseAsk("data", LENGTH, 0, 10, 0), session, itertools.count()) for _ in range(2))
    feed = first.begin()
    assert feed.take() == Span(0, 10)
    wait_until(lambda: feed.ready)
    again = second.begin()
    assert feed.done
    assert [span.begin for span in train_all(again)] == [0, 10, 20, 30]
    first.end(feed)
    second.end()
    assert not session.iterating
