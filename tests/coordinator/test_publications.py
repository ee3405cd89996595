"""Which versions of published weights there are, which are kept, and what readers are told."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from dataclasses import replace

import pytest

from ps_protocol.cluster.weights import (
    FollowAnswer,
    FollowAsk,
    PublishAsk,
    ShardHome,
    WeightsPiece,
    WeightsPin,
    WeightsVersion,
)
from ps_protocol.errors import InvalidRequest, UnknownVersion, VersionGone
from ps_protocol.wire.convert.weights import FOLLOW_ASK, STATE
from ps_server.coordinator.persistence.cluster_records import changed_rows, from_rows
from ps_server.coordinator.publications import (
    LONGEST_PIN_SECONDS,
    MOST_KEPT_BYTES,
    MOST_NAMES,
    MOST_PINS,
    MOST_READERS,
    READER_SECONDS,
    SHOWN_READERS,
    Publications,
)
from ps_server.coordinator.settings import ClusterSettings
from ps_server.coordinator.state import ClusterState

DURABLE = {0: ShardHome(7, "disk-a", "one:1"), 1: ShardHome(8, "disk-b", "two:2")}
MEMORY = {0: ShardHome(7, "", "one:1")}

_TOKENS = itertools.count()


def ask(token: str, name: str = "policy", **changes: object) -> PublishAsk:
    return replace(PublishAsk(name, "model", 5, "{}", 2, token), **changes)  # type: ignore[arg-type]


def pieces(homes: dict[int, ShardHome]) -> list[WeightsPiece]:
    return [WeightsPiece(n, home.incarnation, home.directory, b"c" * 16, 100) for n, home in homes.items()]


def publish(
    made: Publications,
    times: int = 1,
    *,
    homes: dict[int, ShardHome] | None = None,
    now: float = 0.0,
    **changes: object,
) -> list[int]:
    numbers = []
    for _ in range(times):
        request = ask(f"token {next(_TOKENS)}", **changes)
        plan = made.plan(request, 2)
        made.commit(request, plan.number, pieces(DURABLE if homes is None else homes), now, 1000.0 + now)
        numbers.append(plan.number)
    return numbers


def follow(
    made: Publications, have: int = 0, number: int = 0, *, reader: str = "r", now: float = 0.0, leaves: bool = False
) -> FollowAnswer:
    request = FollowAsk("policy", have, number, reader, leaves=leaves)
    return made.follow(request, DURABLE, now, finished=False)


def kept(made: Publications, name: str = "policy") -> list[int]:
    return [version.number for version in made.records[name].versions]


def told(answer: FollowAnswer) -> WeightsVersion:
    assert answer.version is not None
    return answer.version


def test_numbers_rise_by_one_and_as_many_versions_are_kept_as_the_publisher_says() -> None:
    made = Publications()
    assert publish(made, 4) == [1, 2, 3, 4]
    assert kept(made) == [3, 4]


def test_a_version_that_was_not_committed_leaves_its_number_to_the_next() -> None:
    made = Publications()
    publish(made)
    assert made.plan(ask("lost"), 2).number == 2
    assert publish(made) == [2]


def test_an_ask_that_is_repeated_gets_the_version_it_has_made() -> None:
    made = Publications()
    request = ask("once")
    version = made.commit(request, 1, pieces(DURABLE), 0.0, 1000.0).value
    assert made.plan(request, 2).made == version
    again = Publications()
    again.restore(made.records)
    assert again.plan(request, 2).made == version


def test_an_ask_that_comes_when_its_version_and_later_ones_are_committed_makes_no_other() -> None:
    """The newest version would be called by an old step, and nobody would have heard of it."""
    made = Publications()
    late = ask("late", step=1)
    version = made.commit(late, 1, pieces(DURABLE), 0.0, 1000.0).value
    publish(made, 10, step=2)
    plan = made.plan(late, 2)
    assert (plan.number, plan.made) == (1, version)
    assert kept(made) == [10, 11]


def test_of_the_asks_that_made_versions_the_last_are_remembered_and_none_of_a_released_model() -> None:
    made = Publications()
    asks = [ask(f"number {number}") for number in range(20)]
    for number, request in enumerate(asks, 1):
        made.commit(request, number, pieces(DURABLE), 0.0, 1000.0)
    assert [made.plan(each, 2).made is not None for each in asks] == [False] * 4 + [True] * 16
    made.drop_model("model")
    assert made.plan(asks[18], 2).made is None


def test_of_two_publishers_with_one_number_the_second_is_refused() -> None:
    made = Publications()
    made.commit(ask("first"), 1, pieces(DURABLE), 0.0, 1000.0)
    with pytest.raises(InvalidRequest, match="another version"):
        made.commit(ask("second"), 1, pieces(DURABLE), 0.0, 1000.0)


def test_shards_keep_every_version_that_is_committed_until_the_next_one_is() -> None:
    made = Publications()
    publish(made, 3)
    assert made.plan(ask("next"), 2).kept == (2, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ""},
        {"name": "a/b"},
        {"name": ".."},
        {"name": "a" * 65},
        {"keep": 0},
        {"keep": 1001},
        {"metadata": "[1]"},
        {"metadata": "{"},
        {"metadata": '{"a":' + "[" * 8000 + "]" * 8000 + "}"},
        {"metadata": '{"a":' + "[" * 64 + "]" * 64 + "}"},
        {"metadata": json.dumps({"a": "b" * 20_000})},
        {"token": ""},
        {"model": "other"},
    ],
)
def test_what_cannot_be_published_is_refused_and_changes_nothing(changes: dict[str, object]) -> None:
    made = Publications()
    publish(made)
    before = made.records
    with pytest.raises(InvalidRequest):
        made.plan(replace(ask("t"), **changes), 2)  # type: ignore[arg-type]
    assert made.records == before


def test_what_the_journal_has_of_a_name_is_bounded_whatever_metadata_and_shards_there_are() -> None:
    homes = {n: ShardHome(1 << 62, "f" * 32, "shard:7000") for n in range(40)}
    for metadata, shards in (("{}", 1), (json.dumps({"a": "b" * 16_000}), 1), (json.dumps({"a": '"' * 4000}), 40)):
        many = replace(ask("t"), keep=1000, metadata=metadata)
        made, most = Publications(), 1000
        if metadata != "{}":
            with pytest.raises(InvalidRequest, match="so much metadata") as refused:
                made.plan(many, shards)
            most = int(refused.value.expected.split(",")[0].removeprefix("keep at most "))
            with pytest.raises(InvalidRequest, match="so much metadata"):
                made.plan(replace(many, keep=most + 1), shards)
        held = [WeightsPiece(n, 1 << 62, homes[n].directory, b"c" * 16, 1 << 40) for n in range(shards)]
        for number in range(1, most + 3):
            wanted = replace(many, keep=most, token=f"token {number}")
            made.plan(wanted, shards)
            made.commit(wanted, number, held, 0.0, 1_800_000_000.123456)
        state = ClusterState(ClusterSettings())
        state.publications.restore(made.records)
        row = changed_rows(None, state.persisted_state())["publication/policy"]
        assert row is not None
        assert len(row) <= MOST_KEPT_BYTES + 1000
        assert len(made.records["policy"].versions) == most


def test_a_job_publishes_a_bounded_number_of_names() -> None:
    made = Publications()
    for number in range(MOST_NAMES):
        publish(made, name=f"n{number}")
    with pytest.raises(InvalidRequest, match="as many names"):
        made.plan(ask("t", name="more"), 2)


def test_a_reader_is_told_the_newest_version_and_skips_those_between() -> None:
    made = Publications()
    publish(made, 3)
    answer = follow(made, have=1)
    assert told(answer).number == answer.newest == 3
    assert answer.addresses == {0: "one:1", 1: "two:2"}
    assert follow(made, have=3).version is None


def test_a_reader_waits_for_a_name_that_is_not_published_yet_but_not_for_one_that_cannot_be() -> None:
    assert follow(Publications()).version is None
    with pytest.raises(InvalidRequest, match="no name"):
        Publications().follow(FollowAsk("a b", 0, 0, "r"), DURABLE, 0.0, finished=False)


def test_a_version_that_the_job_has_never_had_is_refused() -> None:
    made = Publications()
    publish(made, 2)
    with pytest.raises(UnknownVersion, match="no version 3"):
        follow(made, have=3)
    with pytest.raises(UnknownVersion, match="no version 3"):
        follow(made, number=3)


def test_little_is_remembered_of_what_a_reader_says_of_itself() -> None:
    made = Publications()
    publish(made)
    for _ in range(2):
        made.follow(FollowAsk("policy", 0, 0, "r" * 10_000, "h" * 10_000_000), DURABLE, 0.0, finished=False)
    (reader,) = made.states(DURABLE, 0.0)[0].readers
    assert (len(reader.reader), len(reader.host)) == (64, 64)


def test_no_large_text_of_a_reader_is_remembered() -> None:
    made = Publications("job")
    tracemalloc.start()
    for number in range(10):
        text = str(number) * 1_000_000
        asked = FollowAsk("policy", 0, 0, f"{number}{text}", text, job_id=text)
        made.follow(asked, DURABLE, 0.0, finished=False)
    del text, asked
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes < 100_000


def test_the_readers_behind_relays_are_a_number_that_can_be_sent_whatever_relays_say() -> None:
    made = Publications()
    publish(made)
    for number in range(3):
        asked = FollowAsk("policy", 0, 0, f"r{number}", readers=(1 << 32) - 1)
        made.follow(asked, DURABLE, 0.0, finished=False)
    said = FollowAsk("policy", 0, 0, "relay", readers=made.count_readers("policy", 0.0))
    assert FOLLOW_ASK.from_pb(FOLLOW_ASK.to_pb(said, wait_seconds=0.0)).readers == 300_003


def test_a_version_that_was_removed_is_named_as_gone() -> None:
    made = Publications()
    publish(made, 4)
    with pytest.raises(VersionGone, match="version 1 of 'policy' was removed"):
        follow(made, number=1)
    assert told(follow(made, number=3)).number == 3


def test_a_version_with_a_piece_in_the_memory_of_a_shard_that_ended_is_gone_and_the_one_before_it_too() -> None:
    made = Publications()
    publish(made, 2, homes=MEMORY)
    request = FollowAsk("policy", 0, 0, "r")
    for homes in ({0: ShardHome(9, "", "one:1")}, {}):
        assert made.follow(request, homes, 0.0, finished=False).version is None
        assert made.states(homes, 0.0)[0].gone == (1, 2)
        with pytest.raises(VersionGone, match="in memory"):
            made.follow(replace(request, number=2), homes, 0.0, finished=False)
    assert told(made.follow(request, MEMORY, 0.0, finished=False)).number == 2


def test_a_version_on_disk_waits_for_its_shard_and_is_gone_with_its_directory() -> None:
    made = Publications()
    publish(made)
    away = {0: DURABLE[0]}
    answer = made.follow(FollowAsk("policy", 0, 0, "r"), away, 0.0, finished=False)
    assert told(answer).number == 1
    assert answer.addresses == {0: "one:1"}
    other = {**DURABLE, 1: ShardHome(9, "standby", "three:3")}
    assert made.follow(FollowAsk("policy", 0, 0, "r"), other, 0.0, finished=False).version is None


def test_a_pinned_version_stays_until_its_pin_ends() -> None:
    made = Publications()
    publish(made)
    made.pin("policy", WeightsPin(1, "me", 0.0), 100.0, 1000.0)
    publish(made, 4, now=99.0)
    assert kept(made) == [1, 4, 5]
    publish(made, now=100.0)
    assert kept(made) == [5, 6]


def test_a_pin_is_removed_by_its_holder() -> None:
    made = Publications()
    publish(made)
    for holder in ("me", "you"):
        made.pin("policy", WeightsPin(1, holder, 0.0), 100.0, 1000.0)
    made.pin("policy", WeightsPin(1, "me", 0.0), 0.0, 1000.0)
    publish(made, 3)
    assert kept(made) == [1, 3, 4]
    made.pin("policy", WeightsPin(1, "you", 0.0), 0.0, 1000.0)
    publish(made)
    assert kept(made) == [4, 5]


def test_pins_are_bounded_in_time_and_number_and_need_a_version_that_is_there() -> None:
    made = Publications()
    publish(made, 3)
    pin = WeightsPin(3, "me", 0.0)
    for seconds in (-1.0, LONGEST_PIN_SECONDS + 1, float("nan")):
        with pytest.raises(InvalidRequest, match="so long"):
            made.pin("policy", pin, seconds, 1000.0)
    with pytest.raises(VersionGone):
        made.pin("policy", replace(pin, number=1), 5.0, 1000.0)
    with pytest.raises(UnknownVersion, match="nothing is published"):
        made.pin("other", pin, 5.0, 1000.0)
    for number in range(MOST_PINS):
        made.pin("policy", replace(pin, holder=str(number)), 5.0, 1000.0)
    with pytest.raises(InvalidRequest, match="as many pins"):
        made.pin("policy", pin, 5.0, 1000.0)
    made.pin("policy", pin, 5.0, 1005.0)  # the others have ended


def test_the_version_that_a_reader_was_told_stays_while_it_reads_and_asks() -> None:
    made = Publications()
    publish(made)
    assert told(follow(made, now=0.0)).number == 1
    publish(made, 5, now=READER_SECONDS - 1)
    assert kept(made) == [1, 5, 6]
    publish(made, now=READER_SECONDS + 1)
    assert kept(made) == [6, 7]


def test_a_reader_that_has_read_or_left_keeps_nothing() -> None:
    for ends in ({"have": 1}, {"leaves": True}):
        made = Publications()
        publish(made)
        follow(made)
        follow(made, **ends)  # type: ignore[arg-type]
        publish(made, 3)
        assert kept(made) == [3, 4]


def test_readers_far_apart_keep_no_more_versions_than_the_publisher_does() -> None:
    made = Publications()
    for number in range(10):
        publish(made)
        follow(made, reader=str(number))
    assert kept(made) == [7, 8, 9, 10]


def test_readers_are_shown_while_they_are_heard_of() -> None:
    made = Publications()
    publish(made, 2)
    follow(made, have=1)
    assert [(r.reader, r.have) for r in made.states(DURABLE, 10.0)[0].readers] == [("r", 1)]
    assert made.states(DURABLE, READER_SECONDS)[0].readers == ()


def test_a_version_of_another_job_is_named_whatever_its_number() -> None:
    made = Publications("mine")
    publish(made, 5)
    for have in (1, 5, 6):
        with pytest.raises(UnknownVersion, match=f"version {have} of 'policy' is of another job"):
            made.follow(FollowAsk("policy", have, 0, "r", job_id="other"), DURABLE, 0.0, finished=False)
    assert told(made.follow(FollowAsk("policy", 0, 0, "r", job_id="other"), DURABLE, 0.0, finished=False)).number == 5
    ours = FollowAsk("policy", 4, 0, "r", job_id="mine")
    assert told(made.follow(ours, DURABLE, 0.0, finished=False)).job_id == "mine"


def test_of_many_readers_those_furthest_behind_are_shown_and_all_are_counted() -> None:
    made = Publications()
    publish(made, 30)
    for number in range(MOST_READERS + 7):
        have = 30 - number % 20
        received = FollowAsk("policy", have, 0, str(number), delta_bytes=2, full_bytes=3, saved_bytes=1 << 63)
        made.follow(received, DURABLE, 0.0, finished=False)
    (state,) = made.states(DURABLE, 0.0)
    assert (state.reader_count, state.most_behind, len(state.readers)) == (MOST_READERS, 19, SHOWN_READERS)
    assert {state.behind(reader) for reader in state.readers} == {19}
    assert (state.delta_bytes, state.full_bytes) == (2 * MOST_READERS, 3 * MOST_READERS)
    assert len(STATE.to_pb(state).SerializeToString()) < 20_000
    assert len(made.states(DURABLE, 0.0, 3)[0].readers) == 3


def test_versions_go_with_their_model_and_numbers_do_not_come_again() -> None:
    made = Publications()
    publish(made, 2)
    assert made.drop_model("model").reason
    assert not made.drop_model("model").reason
    assert follow(made, have=2).version is None
    assert publish(made, model="other") == [3]


def test_the_journal_brings_everything_back_and_one_without_publications_is_read() -> None:
    state = ClusterState(ClusterSettings(expected_shards=2))
    rows = {key: row for key, row in changed_rows(None, state.persisted_state()).items() if row is not None}
    assert not any(key.startswith("publication/") for key in rows)
    records = from_rows(rows, "journal")
    assert records is not None
    assert records.publications == {}
    publish(state.publications, 3, metadata='{"loss": 0.25}')
    state.publications.pin("policy", WeightsPin(3, "me", 0.0), 100.0, 1000.0)
    changed = changed_rows(records, state.persisted_state())
    assert list(changed) == ["publication/policy"]
    rows |= {key: row for key, row in changed.items() if row is not None}
    back = from_rows(rows, "journal")
    assert back is not None
    assert back.publications == state.publications.records
    again = ClusterState.restore(ClusterSettings(expected_shards=2), back, 0.0)
    assert publish(again.publications) == [4]
