"""The connection of a process whose trainers, of several libraries, make none themselves."""

from __future__ import annotations

import os
from typing import Any

import pytest

from ps_worker import connection


class Joined:
    """Stands for a Cluster; ``ends`` has with what it was left."""

    def __init__(self) -> None:
        self._left = False
        self.ends: list[BaseException | None] = []

    def __enter__(self) -> Joined:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._left = True
        self.ends.append(error)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "connect", Joined)
    monkeypatch.setattr(connection, "_joined", {})
    monkeypatch.setattr(connection, "_failure", None)


def test_all_trainers_of_a_process_have_one_connection_until_it_is_left() -> None:
    first: Any = connection.connected()
    assert connection.connected() is first
    connection.leave()
    connection.leave()
    assert first.ends == [None]
    assert connection.connected() is not first
    connection.leave()


def test_what_ended_the_last_run_is_the_reason_to_leave() -> None:
    cluster: Any = connection.connected()
    connection.note_failure(error := ValueError())
    connection.leave()
    assert cluster.ends == [error]


def test_a_trainer_that_follows_a_run_that_failed_leaves_without_a_reason() -> None:
    cluster: Any = connection.connected()
    connection.note_failure(ValueError())
    assert connection.connected() is cluster
    connection.leave()
    assert cluster.ends == [None]


def test_a_child_joins_by_itself_and_does_not_leave_for_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster: Any = connection.connected()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        connection.leave()
        assert cluster.ends == []
        assert connection.connected() is not cluster
        connection.leave()
    assert connection.connected() is cluster
    connection.leave()
