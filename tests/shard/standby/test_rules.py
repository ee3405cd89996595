"""Who may take the place of a lost shard: the process that surely has every push that was acknowledged."""

from __future__ import annotations

import pytest

from ps_protocol.cluster.view import Joined, JoinRequest, MemberStats, Role, StandbyReport
from ps_protocol.errors import Fenced, InvalidRequest, NotReady, UnknownShard
from ps_server.coordinator.persistence.cluster_records import changed_rows, from_rows
from ps_server.coordinator.state import ClusterState
from tests.coordinator.cluster import Cluster
from tests.support.seeds import seeded


class Places(Cluster):
    """Shard 0 and its standby, named by their directories."""

    def take(self, directory: str, state: int = 0, *, yields: bool = True) -> Joined:
        self.joins += 1
        ask = JoinRequest(
            Role.SHARD,
            0,
            f"{directory}:1",
            f"token {self.joins}",
            data_incarnation=state,
            directory=directory,
            yields=yields,
        )
        return self.state.membership.join(ask, self.now).value

    def stand_by(self, directory: str, shard: int = 0) -> Joined:
        self.joins += 1
        return self.state.membership.join(
            JoinRequest(Role.STANDBY, shard, "", f"token {self.joins}", directory=directory), self.now
        ).value

    def serve(self, directory: str, state: int = 0) -> int:
        """Take the place and keep state in it; returns the incarnation."""
        joined = self.take(directory, state)
        self.keep(joined)
        return joined.member.incarnation

    def say(self, incarnation: int, number: int, directory: str) -> str:
        return self.state.membership.heartbeat(
            Role.SHARD,
            0,
            incarnation,
            MemberStats(),
            self.now,
            keeps_state=True,
            sync=StandbyReport(number, directory),
        ).reason

    def lose(self) -> None:
        """The lease of every member ends."""
        self.now += 1000.0
        self.state.membership.expire(self.now)


def test_the_first_of_a_pair_gets_the_place_and_the_other_waits() -> None:
    c = Places()
    c.take("a")
    with pytest.raises(NotReady, match="shard 0 exists already"):
        c.take("b")


def test_a_standby_that_has_everything_takes_the_place_when_the_lease_ends_and_not_before() -> None:
    c = Places()
    primary = c.serve("a")
    assert "has everything" in c.say(primary, 1, "b")
    with pytest.raises(NotReady):
        c.take("b", primary)
    c.lose()
    assert c.take("b", primary).member.incarnation > primary


def test_a_standby_of_which_nothing_was_said_is_not_promoted() -> None:
    c = Places()
    primary = c.serve("a")
    c.lose()
    with pytest.raises(
        NotReady, match=r"may lack pushes to shard 0 that were acknowledged.*expected: data directory a"
    ):
        c.take("b", primary)
    assert c.take("a", primary)


def test_a_standby_that_fell_behind_is_not_promoted() -> None:
    c = Places()
    primary = c.serve("a")
    c.say(primary, 1, "b")
    assert "does not have all" in c.say(primary, 2, "")
    c.lose()
    with pytest.raises(NotReady):
        c.take("b", primary)


def test_a_word_that_comes_late_means_nothing() -> None:
    c = Places()
    primary = c.serve("a")
    c.say(primary, 2, "")
    assert c.say(primary, 1, "b") == ""
    c.lose()
    with pytest.raises(NotReady):
        c.take("b", primary)


def test_only_the_newest_primary_has_a_word() -> None:
    c = Places()
    first = c.serve("a")
    c.say(first, 5, "b")
    c.lose()
    second = c.serve("b", first)
    with pytest.raises(Fenced):
        c.say(first, 6, "")
    # What the first said of its standby does not hold for the state of the second.
    c.lose()
    with pytest.raises(NotReady):
        c.take("a", second)
    with pytest.raises(NotReady, match="newer state elsewhere"):
        c.take("a", first)
    assert c.take("b", second)


def test_a_copy_that_lacks_pushes_does_not_take_the_place_as_a_plain_shard_either() -> None:
    c = Places()
    primary = c.serve("a")
    with pytest.raises(Fenced, match="may lack pushes"):
        c.take("b", primary, yields=False)
    assert c.take("a", primary, yields=False)


def test_an_empty_standby_does_not_take_the_place_of_a_shard_that_had_state() -> None:
    c = Places()
    primary = c.serve("a")
    c.lose()
    with pytest.raises(NotReady, match="holds no state of shard 0"):
        c.take("b")
    assert c.take("a", primary)


def test_a_primary_started_again_does_not_wait_for_its_own_lease() -> None:
    c = Places()
    primary = c.serve("a")
    c.say(primary, 1, "b")
    assert c.take("a", primary).member.incarnation > primary
    # Before it wrote anything as the new one, what was said before holds.
    c.lose()
    assert c.take("b", primary)


def test_a_shard_has_one_standby_and_the_next_life_of_it_does_not_wait() -> None:
    c = Places()
    c.serve("a")
    first = c.stand_by("b")
    with pytest.raises(NotReady, match="standby 0 exists already"):
        c.stand_by("c")
    c.stand_by("b")
    with pytest.raises(Fenced):
        c.heartbeat(first)
    assert sorted(c.state.view.live(Role.STANDBY)) == [0]


def test_a_standby_of_a_shard_the_cluster_does_not_have_is_refused() -> None:
    with pytest.raises(UnknownShard, match="no shard 3"):
        Places().stand_by("b", 3)
    with pytest.raises(InvalidRequest, match="name of its data directory"):
        Places().stand_by("")


def test_a_restarted_coordinator_knows_who_may_take_the_place() -> None:
    c = Places()
    primary = c.serve("a")
    c.say(primary, 1, "b")
    rows = {key: row for key, row in changed_rows(None, c.state.persisted_state()).items() if row is not None}
    kept = from_rows(rows, "journal")
    assert kept is not None
    c.state = ClusterState.restore(c.settings, kept, c.now)
    c.lose()
    assert c.take("b", primary)


def test_a_promoted_standby_has_everything_acknowledged_whatever_happens() -> None:
    """Random lives of three directories; the model: what each has, and what was acknowledged."""
    chance = seeded()
    for _ in range(200):
        c, states, has, words = Places(), dict.fromkeys("abc", 0), dict.fromkeys("abc", 0), 0
        holder, acknowledged, synced = "", 0, ""
        incarnation = 0
        for _ in range(60):
            name = chance.choice("abc")
            match chance.randrange(5):
                case 0 if holder:
                    c.lose()
                    holder = synced = ""
                case 1 if not holder:
                    try:
                        incarnation = c.serve(name, states[name])
                    except NotReady:
                        continue
                    assert has[name] >= acknowledged, f"'{name}' lacks pushes"
                    states[name], holder, synced, words = incarnation, name, "", 0
                case 2 if holder and name != holder:
                    states[name], has[name] = incarnation, has[holder]
                    words += 1
                    c.say(incarnation, words, name)
                    synced = name
                case 3 if holder and synced:
                    words += 1
                    c.say(incarnation, words, "")
                    synced = ""
                case 4 if holder:
                    acknowledged += 1
                    has[holder] = acknowledged
                    if synced:
                        has[synced] = acknowledged
