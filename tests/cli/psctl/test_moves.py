"""psctl move and drain against a real coordinator and shards that hold no tensors."""

from __future__ import annotations

import json
import re
import signal

import click
import pytest
from click.testing import CliRunner

from ps_protocol.errors import StorageFull
from ps_server.cli.psctl import main, moves
from tests.cli.launcher.fake_job import FakeJob, running_job
from tests.coordinator.moving_job import SPEC


class Job(FakeJob):
    """A coordinator with two shards that hold a model, and a spare one."""

    def slices(self):
        held = self.client.get_shard_map("net").slices
        return [sum(s.shard == number for s in held) for number in range(3)]


@pytest.fixture
def job():
    with running_job(Job, SPEC) as job:
        yield job


def test_move_gives_a_spare_shard_its_share_and_says_how_long_training_held_still(job):
    done = job.psctl("move", "--to", "2")
    assert done.exit_code == 0, done.output
    line, last = done.output.splitlines()
    assert re.fullmatch(r"moved 2\.0 kB in 1 batch of 2\.0 kB; training paused for \d+\.\d\d s", line)
    assert re.fullmatch(r"moved 2\.0 kB in 1 batch; longest pause \d+\.\d\d s", last)
    assert job.slices() == [3, 3, 2]
    again = job.psctl("move", "--balance")
    assert (again.exit_code, again.output) == (0, "nothing had to move\n")


def test_moves_as_json_are_one_object_and_the_progress_is_on_stderr(job):
    moved = job.psctl("move", "--to", "2", "--json")
    assert moved.exit_code == 0, moved.output
    assert "training paused for " in moved.stderr
    facts = json.loads(moved.stdout)
    assert facts.pop("longest_pause_seconds") > 0
    assert facts == {"moved_bytes": 2048, "batches": 1}
    drained = json.loads(job.psctl("drain", "2", "--json").stdout)
    assert (drained["drained"], drained["moved_bytes"]) == ([2], 2048)
    nothing = json.loads(job.psctl("move", "--balance", "--json").stdout)
    assert nothing == {"moved_bytes": 0, "batches": 0, "longest_pause_seconds": 0.0}


def test_drain_says_that_the_shard_may_be_stopped(job):
    done = job.psctl("drain", "1", "--to", "2")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == "shard 1 is empty and can be stopped"
    assert job.slices() == [4, 0, 4]


def test_one_variable_is_moved_by_name(job):
    done = job.psctl("move", "--model", "net", "--variable", "v5", "--to", "2")
    assert done.exit_code == 0, done.output
    assert [s.variable for s in job.client.get_shard_map("net").slices if s.shard == 2] == [5]


def test_status_shows_spare_shards_apart(job):
    shown = job.psctl("status").output
    assert "2 of 2 shards and 1 spare" in shown
    assert [row.split()[2] for row in shown.splitlines() if row.startswith("shard")] == ["live", "live", "spare"]
    assert json.loads(job.psctl("status", "--json").output)["view"]["spare"] == [2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("move", "--to", "3"), "the job has no shard 3; .*remedy: add it first: ps-server --shard 3 --add"),
        (("drain", "0", "1"), "at least one shard has to hold the models; .*remedy: add one first"),
        (("move", "--to", "0", "--model", "other", "--variable", "v0"), "no model 'other'.*expected: 'net'"),
        (("move", "--to", "0", "--model", "net", "--variable", "x"), "has no such variable or table; variable: x"),
        (("drain", "1", "--to", "1"), "both as a target and to be drained"),
    ],
)
def test_what_cannot_be_moved_is_one_line_with_the_remedy_and_exit_code_1(job, arguments, says):
    done = job.psctl(*arguments)
    assert done.exit_code == 1
    assert done.output.startswith("Error: ")
    assert done.output.count("\n") == 1
    assert re.search(says, done.output)


def test_a_batch_that_cannot_be_had_is_one_line_and_what_was_moved_stays(job):
    job.shards[0].fails["StageReshard"] = [StorageFull("the disk of shard 0 is full", shard="0")]
    done = job.psctl("move", "--to", "2")
    assert (done.exit_code, done.output) == (1, "Error: the disk of shard 0 is full; shard: 0\n")
    assert job.slices() == [4, 4, 0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("move",), "give --to N, or --balance"),
        (("move", "--to", "0", "--model", "net"), "--model and --variable need each other"),
        (("move", "--to", "0", "--to", "1", "--model", "net", "--variable", "v0"), "exactly one --to"),
        (("drain",), "Missing argument"),
    ],
)
def test_a_command_that_says_too_little_is_a_usage_error(arguments, says):
    done = CliRunner().invoke(main.main, [*arguments, "--coordinator", "127.0.0.1:1"])
    assert done.exit_code == 2
    assert says in done.output


def test_without_a_coordinator_there_it_is_one_line():
    done = CliRunner().invoke(main.main, ["drain", "0", "--coordinator", "127.0.0.1:1"])
    assert done.exit_code == 1
    assert "127.0.0.1:1 does not answer" in done.output
    assert done.output.count("\n") == 1


def test_ctrl_c_says_what_was_moved_and_the_same_command_goes_on(job, monkeypatch):
    monkeypatch.setattr(moves, "MB", 1)
    shown = click.echo

    def interrupt(text, **options):
        shown(text, **options)
        if " of " in text and "stopped" not in text:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(click, "echo", interrupt)
    done = job.psctl("move", "--to", "2", "--batch-mb", "1024")
    assert done.exit_code == 130
    assert "stopped: moved 1.0 kB in 1 batch of 2.0 kB" in done.output
    monkeypatch.undo()
    done = job.psctl("move", "--to", "2")
    while "moved already" in done.output:  # the batch under way
        done = job.psctl("move", "--to", "2")
    assert done.exit_code == 0, done.output
    assert job.slices() == [3, 3, 2]
