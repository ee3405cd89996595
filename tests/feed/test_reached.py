"""Whether a copy has come to the position of a version: through restarts of shards, moves of buckets, other jobs."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import InvalidRequest, NotReady, StateLost, Unavailable, UnknownModel
from ps_protocol.feed.cursor import Cursor, Cursors
from ps_protocol.feed.reader import Change
from ps_worker import feed
from ps_worker.feed import TableCopy
from tests.support.tables import array, table_spec

SPEC = table_spec(dim=2)


def at(*shards: tuple[int, str, int, int, int], epoch: int = 1, job: str = "job", table: str = "ads") -> Cursor:
    """A cursor; of each shard its number, lineage, updates, changes, incarnation."""
    positions = {
        str(number): {"lineage": lineage, "updates": str(updates), "changes": str(changes), "incarnation": str(born)}
        for number, lineage, updates, changes, born in shards
    }
    return {"model": "model", "table": table, "job_id": job, "epoch": epoch, "shards": positions}


def reached(here: Cursor, there: Cursor, whole_epoch: int = 1) -> bool:
    return Cursors.of(here, "model", "ads").has_reached(Cursors.of(there, "model", "ads"), whole_epoch)


VERSION = at((0, "a", 10, 3, 100), (1, "b", 20, 4, 101))


@pytest.mark.parametrize(
    ("here", "is_there"),
    [
        (VERSION, True),
        (at((0, "a", 11, 3, 100), (1, "b", 25, 9, 101)), True),
        (at((0, "a", 9, 3, 100), (1, "b", 20, 4, 101)), False),
        (at((0, "a", 10, 3, 100), (1, "b", 20, 3, 101)), False),
        # Of shard 1 not all has come since it was started again.
        (at((0, "a", 10, 3, 100)), False),
    ],
)
def test_each_shard_has_to_have_sent_what_there_was(here: Cursor, is_there: bool) -> None:
    assert reached(here, VERSION) is is_there


def test_all_that_a_shard_has_after_a_restart_is_what_there_was_and_more() -> None:
    assert reached(at((0, "new", 10, 0, 200), (1, "b", 20, 4, 101)), VERSION)
    # The version is of the shard after its restart; the copy has what was before.
    assert not reached(VERSION, at((0, "new", 10, 0, 200), (1, "b", 20, 4, 101)))


def test_updates_that_a_shard_has_lost_are_an_error_that_names_it() -> None:
    with pytest.raises(StateLost, match=r"shard 0 has lost the last updates of table 'ads'.*update 10.*update 7"):
        reached(at((0, "new", 7, 0, 200), (1, "b", 20, 4, 101)), VERSION)


def test_after_a_move_everything_has_to_have_come_once() -> None:
    moved = at((0, "a", 10, 3, 100), (2, "c", 0, 0, 102), epoch=2)
    assert not reached(moved, VERSION, whole_epoch=1)
    assert reached(moved, VERSION, whole_epoch=2)
    assert not reached(at((0, "a", 9, 3, 100), epoch=2), VERSION, whole_epoch=2)
    # The version is of after the move.
    assert not reached(VERSION, moved, whole_epoch=1)


def test_a_table_that_was_declared_again_is_another_one_in_the_same_shards() -> None:
    again = at((0, "c", 1, 0, 100), (1, "d", 1, 0, 101), epoch=3)
    assert not reached(VERSION, again)
    assert reached(again, VERSION, whole_epoch=3)


def test_a_position_of_another_job_table_or_of_no_table_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"another job's table 'ads'.*job other"):
        reached(VERSION, at(job="other"))
    with pytest.raises(InvalidRequest, match="cursor of another table"):
        reached(VERSION, at(table="users"))
    for wrong in ({}, {**VERSION, "epoch": "many"}, {**VERSION, "shards": [1]}):
        with pytest.raises(InvalidRequest, match="not a cursor"):
            reached(VERSION, wrong)


def test_a_cursor_of_version_0_1_0_is_one_of_no_known_job() -> None:
    old = {"model": "model", "table": "ads", "shards": {"0": {"lineage": "a", "updates": "1", "changes": "1"}}}
    assert Cursors.of(old, "model", "ads").job_id == ""
    assert not reached(old, VERSION)


def change(cursor: Cursor, *, whole: bool = True) -> Change:
    return Change(0, SPEC, (), array(), array(), np.empty((0, 2), np.float32), whole=whole, cursor=cursor)


def copy_at(cursor: Cursor, *, whole: bool = True) -> TableCopy:
    copy = TableCopy()
    copy.apply(change(cursor, whole=whole))
    return copy


def test_a_copy_waits_until_the_change_has_come() -> None:
    copy, done = TableCopy(), threading.Event()

    def wait() -> None:
        copy.wait_for({"ads": VERSION, "users": {}})
        done.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    copy.apply(change(at((0, "a", 9, 3, 100), (1, "b", 20, 4, 101))))
    assert not done.wait(0.05)
    copy.apply(change(VERSION, whole=False))
    waiting.join(60)
    assert done.is_set()


def test_it_says_when_the_change_does_not_come_in_time() -> None:
    copy = copy_at(at((0, "a", 9, 3, 100), (1, "b", 20, 4, 101)))
    for seconds in (0, 0.01):
        with pytest.raises(NotReady, match="copy of table 'ads' has not come to the version in"):
            copy.wait_for({"ads": VERSION}, timeout_seconds=seconds)
    with pytest.raises(NotReady):
        TableCopy().wait_for({"ads": VERSION}, timeout_seconds=0)


def test_a_version_without_the_table_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"no table 'ads', of which this is a copy.*expected: items, users"):
        copy_at(VERSION).wait_for({"users": {}, "items": {}})
    with pytest.raises(InvalidRequest, match="expected: a version of a model with tables"):
        copy_at(VERSION).wait_for({})


def test_what_a_file_has_of_another_job_is_not_taken_for_that_of_this_one(tmp_path: Any) -> None:
    copy_at(at((0, "a", 99, 99, 999), (1, "b", 99, 99, 999), job="other")).save(tmp_path / "copy")
    copy = TableCopy.load(tmp_path / "copy")
    with pytest.raises(NotReady):
        copy.wait_for({"ads": VERSION}, timeout_seconds=0)
    copy.apply(change(VERSION))
    copy.wait_for({"ads": VERSION}, timeout_seconds=0)


@pytest.mark.parametrize("error", [UnknownModel("no model"), Unavailable("nobody")])
def test_who_waits_gets_the_error_with_which_following_ended(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def broken(*_: object, **__: object) -> Any:
        yield change(at((0, "a", 1, 1, 100)))
        raise error

    monkeypatch.setattr(feed, "follow_table", broken)
    copy = TableCopy()
    with pytest.raises(type(error)):
        copy.follow("nowhere", "ads")
    with pytest.raises(type(error)):
        copy.wait_for({"ads": VERSION})
    monkeypatch.setattr(feed, "follow_table", lambda *_, **__: iter([change(VERSION)]))
    copy.follow("nowhere", "ads")
    copy.wait_for({"ads": VERSION})
    with pytest.raises(Unavailable, match=r"does not follow it any more.*the job is over"):
        copy.wait_for({"ads": at((0, "a", 11, 3, 100), (1, "b", 20, 4, 101))})


def test_a_defect_ends_the_wait_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> Any:
        raise ZeroDivisionError
        yield

    monkeypatch.setattr(feed, "follow_table", broken)
    copy = TableCopy()
    with pytest.raises(ZeroDivisionError):
        copy.follow("nowhere", "ads")
    with pytest.raises(Unavailable, match="does not follow it any more"):
        copy.wait_for({"ads": VERSION})
