"""When an exchange is complete, and what is kept of it. Costs less than a second."""

import random

import pytest

from ps_protocol.cluster.exchange import ExchangeKey, ExchangeState
from ps_protocol.errors import InvalidRequest
from ps_server.coordinator.exchanges import ExchangeLimits, Exchanges
from tests.support.length import choose

FIRST, SECOND = ExchangeKey("loss", 0), ExchangeKey("loss", 1)


def exchanges(live: dict[int, int], **limits: int) -> Exchanges:
    made = Exchanges(ExchangeLimits(**limits))
    made.members(live)
    return made


def done(state: ExchangeState) -> dict[int, bytes]:
    assert state.complete
    return dict(state.payloads)


def test_it_is_complete_when_all_live_workers_have_given_and_never_changes() -> None:
    e = exchanges({0: 10, 1: 11})
    assert e.give(1, 11, FIRST, b"b") == ExchangeState(False, missing=(0,))
    result = e.give(0, 10, FIRST, b"a")
    assert list(result.payloads.items()) == [(0, b"a"), (1, b"b")]
    assert e.give(1, 11, FIRST, b"another") == result


def test_a_repetition_replaces_the_payload_while_it_is_open() -> None:
    e = exchanges({0: 10, 1: 11})
    e.give(1, 11, FIRST, b"old")
    e.give(1, 11, FIRST, b"new")
    assert done(e.give(0, 10, FIRST, b"a")) == {0: b"a", 1: b"new"}


def test_the_start_of_the_job_is_waited_for() -> None:
    e = Exchanges()
    e.members({0: 10}, expected={1})
    assert e.give(0, 10, FIRST, b"a").missing == (1,)
    e.members({0: 10, 1: 11})
    assert not e.give(0, 10, FIRST, b"a").complete
    assert done(e.give(1, 11, FIRST, b"b")) == {0: b"a", 1: b"b"}


def test_workers_that_go_are_not_waited_for_and_their_payloads_are_dropped() -> None:
    e = exchanges({0: 10, 1: 11, 2: 12})
    e.give(0, 10, FIRST, b"a")
    e.give(1, 11, FIRST, b"b")
    e.members({0: 10, 2: 12})
    assert e.give(0, 10, FIRST, b"a").missing == (2,)
    e.members({0: 10})
    assert done(e.give(0, 10, FIRST, b"a")) == {0: b"a"}


def test_a_worker_that_starts_again_gets_what_the_others_have_passed_and_is_not_waited_for() -> None:
    e = exchanges({0: 10, 1: 11})
    e.give(0, 10, FIRST, b"a")
    e.give(1, 11, FIRST, b"b")
    e.members({0: 10})
    e.members({0: 10, 1: 12})
    assert done(e.give(0, 10, SECOND, b"c")) == {0: b"c"}
    assert done(e.give(1, 12, FIRST, b"late")) == {0: b"a", 1: b"b"}
    assert done(e.give(1, 12, SECOND, b"late")) == {0: b"c"}
    third = ExchangeKey("loss", 2)
    assert e.give(1, 12, third, b"d").missing == (0,)
    assert done(e.give(0, 10, third, b"e")) == {0: b"e", 1: b"d"}
    assert e.give(0, 10, ExchangeKey("loss", 3), b"f").missing == (1,)


def test_a_worker_that_has_gone_on_within_a_name_is_not_waited_for() -> None:
    e = exchanges({0: 10, 1: 11})
    assert not e.give(1, 11, ExchangeKey("fit", 5 << 32), b"later").complete
    assert done(e.give(0, 10, ExchangeKey("fit", 3), b"a")) == {0: b"a"}
    assert e.give(0, 10, ExchangeKey("other", 3), b"a").missing == (1,)
    assert done(e.give(0, 10, ExchangeKey("fit", 5 << 32), b"a")) == {0: b"a", 1: b"later"}


def test_when_no_worker_lives_all_is_forgotten() -> None:
    e = exchanges({0: 10})
    e.give(0, 10, FIRST, b"a")
    e.members({})
    e.members({0: 11, 1: 12})
    assert e.give(0, 11, FIRST, b"b").missing == (1,)


def test_old_results_are_dropped_by_number_and_by_bytes_and_asking_for_one_is_an_error() -> None:
    e = exchanges({0: 10, 1: 11}, kept=3)
    f = exchanges({0: 10}, kept_bytes=3 * (64 + 100))
    for ordinal in range(5):
        key = ExchangeKey("loss", ordinal)
        e.give(0, 10, key, b"a")
        done(e.give(1, 11, key, b"b"))
        done(f.give(0, 10, key, bytes(100)))
    for each in (e, f):
        assert sorted(key.ordinal for key in each.persisted_state().complete) == [2, 3, 4]
        with pytest.raises(InvalidRequest, match=r"number 1 is not kept.*number above 1.*at a checkpoint"):
            each.give(0, 10, SECOND, b"late")
        assert each.give(0, 10, ExchangeKey("loss", 5), b"").missing in ((1,), ())


@pytest.mark.parametrize(
    ("key", "payload", "expected"),
    [
        (ExchangeKey("", 0), b"", "needs a name"),
        (ExchangeKey("n" * 257, 0), b"", "needs a name"),
        (ExchangeKey("n", 1 << 63), b"", "a number from 0"),
        (ExchangeKey("n", 0), bytes(101), r"at most 100 bytes from one worker; actual: 101 bytes"),
        (ExchangeKey("n", 0), bytes(60), r"too large together; expected: at most 110 bytes"),
        (ExchangeKey("third", 0), b"", r"one name too many; expected: at most 2 names"),
    ],
)
def test_what_is_above_a_limit_is_refused_and_changes_nothing(key: ExchangeKey, payload: bytes, expected: str) -> None:
    e = exchanges({0: 10, 1: 11}, payload_bytes=100, exchange_bytes=110, names=2)
    e.give(1, 11, ExchangeKey("n", 0), bytes(60))
    e.give(1, 11, ExchangeKey("m", 0), b"")
    before = e.persisted_state()
    with pytest.raises(InvalidRequest, match=expected):
        e.give(0, 10, key, payload)
    assert e.persisted_state() == before
    assert done(e.give(0, 10, ExchangeKey("n", 0), bytes(50))) == {0: bytes(50), 1: bytes(60)}


def test_workers_killed_and_started_again_at_random_all_get_one_result_and_end() -> None:
    """Workers run one script of exchanges each; the coordinator starts again now and then."""
    for seed in range(choose(40, 400)):
        chance = random.Random(seed)
        script = [ExchangeKey(chance.choice("ab"), 0)]
        for _ in range(12):
            name = chance.choice("ab")
            script.append(ExchangeKey(name, sum(key.name == name for key in script)))
        e, incarnations, live = Exchanges(), iter(range(1, 10_000)), {}
        at = dict.fromkeys(range(3), 0)
        results: dict[ExchangeKey, dict[int, bytes]] = {}
        for rank in at:
            live[rank] = next(incarnations)
        e.members(live)
        kills = 6
        while at:
            event = chance.random()
            rank = chance.choice(list(at))
            if event < 0.1 and kills and len(live) > 1:
                kills -= 1
                live.pop(rank)
                e.members(live)
                live[rank] = next(incarnations)
                at[rank] = 0
                e.members(live)
            elif event < 0.2:
                e = Exchanges.restore(e.persisted_state())
                e.members(live)
            elif (state := e.give(rank, live[rank], script[at[rank]], f"{live[rank]}".encode())).complete:
                assert results.setdefault(script[at[rank]], dict(state.payloads)) == state.payloads, f"seed {seed}"
                at[rank] += 1
                if at[rank] == len(script):
                    del at[rank], live[rank]
                    e.members(live)
