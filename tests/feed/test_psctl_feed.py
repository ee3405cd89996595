"""psctl feed: what it prints, what it keeps, how it fails."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from ps_protocol.client.admin import AdminClient
from ps_server.cli.options.common import clean_errors
from ps_server.cli.psctl import main
from tests.feed.following import FakeCoordinator, held


@contextmanager
def connected_to(coordinator: FakeCoordinator):
    """As the commands connect, without a coordinator at the address."""
    with clean_errors():
        yield AdminClient(coordinator)


@pytest.fixture
def made(made, monkeypatch):
    coordinator = FakeCoordinator(made)
    monkeypatch.setattr("ps_server.cli.psctl.feed.connected", lambda address: connected_to(coordinator))
    return made


def feed(*arguments: str):
    return CliRunner().invoke(main.main, ["--coordinator", "nowhere:1", "feed", "--once", *arguments])


def test_every_change_is_one_line_for_people(made, worker):
    worker.train(2)
    done = feed("--table", "ads")
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert all(line.startswith("shard ") for line in lines)
    assert any("2 buckets reset, " in line and " rows" in line for line in lines)
    assert "up to update 2; everything" in lines[-1]


def test_programs_get_ids_and_rows(made, worker):
    worker.train(2)
    done = feed("--table", "ads", "--json")
    changes = [json.loads(line) for line in done.output.splitlines()]
    told = {id_: tuple(row) for change in changes for id_, row in zip(change["ids"], change["rows"], strict=True)}
    assert told == held(made)
    assert changes[-1]["whole"]
    assert {bucket for change in changes for bucket in change["reset_buckets"]} == {0, 1, 2, 3}


def test_with_a_cursor_it_goes_on_where_it_was(made, worker, tmp_path):
    worker.train(2)
    options = ("--table", "ads", "--json", "--cursor", str(tmp_path / "cursor"))
    feed(*options)
    assert all(not json.loads(line)["ids"] for line in feed(*options).output.splitlines())
    worker.train(1)
    changes = [json.loads(line) for line in feed(*options).output.splitlines()]
    assert 0 < sum(len(change["ids"]) for change in changes) <= 20
    assert not any(change["reset_buckets"] for change in changes)


@pytest.mark.parametrize(
    ("kept", "table", "part"),
    [
        ("", "ads", "cursor is damaged"),
        ("3", "ads", "cursor is damaged"),
        (None, "adds", "has no table 'adds'"),
    ],
)
def test_what_cannot_be_followed_is_one_clear_line_and_exit_code_1(made, tmp_path, kept, table, part):
    path = tmp_path / "cursor"
    if kept is not None:
        path.write_text(kept)
    done = feed("--table", table, "--cursor", str(path))
    assert done.exit_code == 1
    assert part in done.output
    assert done.output.count("\n") == 1
