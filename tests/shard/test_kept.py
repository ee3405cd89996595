"""Which slices an answer leaves out: those that the worker holds as they are."""

from __future__ import annotations

import random

from ps_protocol.layout import Layout
from ps_server.shard.kept import Kept, LastChanges
from tests.support.shards import simple_spec, whole_map

LAYOUT = Layout.of(whole_map(simple_spec((2,), (3,), (4,), (5,))), 0)
ALL = frozenset(range(LAYOUT.parameter_slices))


def test_a_worker_that_keeps_nothing_is_sent_everything() -> None:
    changes = LastChanges(LAYOUT)
    kept = Kept(changes, keeps=False, differences=False)
    kept.sent(changes.number, raw=False)
    assert kept.unchanged() == ()


def test_a_stream_begins_with_everything_and_leaves_out_what_has_not_changed() -> None:
    changes = LastChanges(LAYOUT)
    kept = Kept(changes, keeps=True, differences=False)
    assert kept.unchanged() == ()
    kept.sent(changes.number, raw=False)
    assert kept.unchanged() == tuple(ALL)
    changes.record(frozenset({0, 2}))
    assert kept.unchanged() == (0, 2)
    changes.record(None)
    assert kept.unchanged() == (0, 2)
    changes.record(frozenset())
    assert kept.unchanged() == ()


def test_what_changes_while_an_answer_is_on_its_way_is_in_the_next() -> None:
    changes = LastChanges(LAYOUT)
    kept = Kept(changes, keeps=True, differences=False)
    number = changes.number
    changes.record(ALL - {1})
    kept.sent(number, raw=False)
    assert kept.unchanged() == tuple(sorted(ALL - {1}))


def test_with_differences_only_what_came_raw_is_whole() -> None:
    changes = LastChanges(LAYOUT)
    kept = Kept(changes, keeps=True, differences=True)
    kept.sent(changes.number, raw=True)
    changes.record(ALL - {1})
    kept.sent(changes.number, raw=False)
    assert kept.unchanged() == tuple(sorted(ALL - {1}))
    kept.sent(changes.number, raw=True)
    assert kept.unchanged() == tuple(ALL)


def test_random_changes_against_a_list_of_versions() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    changes, versions = LastChanges(LAYOUT), [0] * len(ALL)
    held = {Kept(changes, keeps=True, differences=False): [-1] * len(ALL) for _ in range(3)}
    for _ in range(2000):
        if chance.random() < 0.5:
            untouched = chance.choice([frozenset(), None, frozenset(chance.sample(sorted(ALL), chance.randint(1, 4)))])
            changes.record(untouched)
            for index in ALL - (ALL if untouched is None else untouched):
                versions[index] += 1
        else:
            kept, own = chance.choice(list(held.items()))
            unchanged = kept.unchanged()
            for index in ALL:
                if index in unchanged:
                    assert own[index] == versions[index]
                own[index] = versions[index]
            kept.sent(changes.number, raw=False)
            assert kept.unchanged() == tuple(ALL)
