"""psctl against a real coordinator: what it shows, what it changes, how it fails."""

import json
import re
import socket
import threading
import time

import pytest
from click.testing import CliRunner

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import ClosedModelAsk, JoinRequest, MemberStats, Role
from ps_protocol.model.spec import Consistency, Mode
from ps_server.checkpoint.directory import KeptMark, protect
from ps_server.cli.psctl import connection, main
from ps_server.coordinator.settings import ClusterSettings
from tests.checkpoint.support import Job, shard_map_of, small_spec
from tests.coordinator.cluster import SPEC
from tests.support.coordinators import running_coordinator


@pytest.fixture(scope="module")
def job():
    """A coordinator with one shard and two workers that have reported."""
    settings = ClusterSettings(expected_workers=2, lease_seconds=600)
    with running_coordinator(settings) as coordinator, CoordinatorClient(coordinator.address) as client:
        shard = client.join(JoinRequest(Role.SHARD, 0, "127.0.0.1:4444"), "s").member
        workers = [client.join(JoinRequest(Role.WORKER, rank), f"w{rank}").member for rank in range(2)]
        client.heartbeat(
            shard, MemberStats(steps=24, version=23, versions={"m": 23}, steps_per_second=4.5, bytes_per_second=2.5e6)
        )
        client.heartbeat(
            workers[1], MemberStats(steps=12, samples=99, samples_per_second=801, staleness=3, metrics={"loss": 0.25})
        )
        coordinator._driver.events.add("shard 0 is hot", warning=True, decision=True)
        yield client


def psctl_says(*arguments: str, **environment: str):
    return CliRunner().invoke(main.main, arguments, env={"PS_COORDINATOR": None, "COLUMNS": "120", **environment})


def test_status_shows_every_member_with_its_numbers(job):
    done = psctl_says("status", "--coordinator", job.address)
    assert done.exit_code == 0
    headline, *rows = done.output.splitlines()
    assert headline.startswith("async · training · 1 of 1 shards · 2 of 2 workers")
    assert any(row.split()[:6] == ["worker", "1", "live", "12", "0", "0"] and "loss 0.25" in row for row in rows)
    assert any(
        row.split()[:6] == ["shard", "0", "live", "23", "4.5", "2.5M"] and "127.0.0.1:4444" in row for row in rows
    )


def test_the_address_may_stand_before_the_command_or_in_the_environment(job):
    assert psctl_says("--coordinator", job.address, "status").exit_code == 0
    assert psctl_says("status", PS_COORDINATOR=job.address).exit_code == 0


def test_status_as_json_holds_the_same_for_programs(job):
    told = json.loads(psctl_says("status", "--json", "--coordinator", job.address).output)
    assert told["view"]["consistency"]["mode"] == "async"
    members = {(m["member"]["role"], m["member"]["index"]): m for m in told["members"]}
    assert members["worker", 1]["stats"]["metrics"] == {"loss": 0.25}
    assert members["shard", 0]["stats"]["version"] == 23
    (decided,) = told["decisions"]
    assert (decided["text"], decided["warning"]) == ("shard 0 is hot", True)


def test_mode_changes_the_running_job(job):
    done = psctl_says("mode", "ssp", "--staleness", "2", "--coordinator", job.address)
    assert (done.exit_code, done.output) == (0, "mode is now ssp(2)\n")
    assert job.get_status().view.consistency.mode is Mode.SSP
    assert psctl_says("mode", "async", "--coordinator", job.address).exit_code == 0
    assert job.get_status().view.consistency.mode is Mode.ASYNC


def test_release_drops_a_model_that_no_worker_uses(job):
    worker = next(m for m in job.get_status().view.members if m.role is Role.WORKER)
    job.declare_model(worker, SPEC)
    done = psctl_says("release", "net", "--coordinator", job.address)
    assert (done.exit_code, done.output.count("\n")) == (1, 1)
    assert "model 'net' is used by worker 0; expected: a model that every worker has closed" in done.output
    job.close_model(worker, ClosedModelAsk("net", 1, release=False), 0.0)
    done = psctl_says("release", "net", "-o", "json", "--coordinator", job.address)
    assert json.loads(done.output) == {"model": "net", "released_bytes": 1632}
    job.declare_model(worker, SPEC)
    job.close_model(worker, ClosedModelAsk("net", 2, release=False), 0.0)
    done = psctl_says("release", "net", "--coordinator", job.address)
    assert (done.exit_code, done.output) == (0, "model 'net' is released: 1.6 kB of values\n")
    done = psctl_says("release", "net", "--coordinator", job.address)
    assert done.exit_code == 1
    assert done.output.startswith("Error: model 'net' was released")


def test_a_mode_the_job_cannot_have_is_one_clear_line_and_exit_code_1(job):
    done = psctl_says("mode", "sync", "--backup", "2", "--coordinator", job.address)
    assert done.exit_code == 1
    assert done.output.startswith("Error: ")
    assert done.output.count("\n") == 1


def test_a_flag_of_another_mode_is_a_usage_error(job):
    done = psctl_says("mode", "sync", "--staleness", "2", "--coordinator", job.address)
    assert done.exit_code == 2
    assert "--staleness has no effect in mode sync, only in ssp" in done.output


def test_without_an_address_the_two_ways_to_give_it_are_named():
    done = psctl_says("status")
    assert done.exit_code == 2
    assert "--coordinator HOST:PORT or set PS_COORDINATOR" in done.output


def test_watching_ends_with_the_job():
    with running_coordinator(ClusterSettings()) as coordinator, CoordinatorClient(coordinator.address) as client:
        client.join(JoinRequest(Role.SHARD, 0, "127.0.0.1:4444"), "s")
        worker = client.join(JoinRequest(Role.WORKER, 0), "w").member
        client.leave(worker)
        done = psctl_says("status", "--watch", "--coordinator", coordinator.address)
    assert done.exit_code == 0
    stamp, line = done.output[:19], done.output[20:]
    assert time.strptime(stamp, "%Y-%m-%d %H:%M:%S")
    assert line == "async | finished | worker 0 step 0 stale 0 left | shard 0 version 0 0 pushes/s 0B/s\n"


@pytest.mark.parametrize("name", ["[/red]x", "[link=http://x]y", "loss\x1b[2J"])
def test_names_from_outside_are_shown_as_they_are_and_move_no_cursor(name):
    with running_coordinator(ClusterSettings()) as coordinator, CoordinatorClient(coordinator.address) as client:
        worker = client.join(JoinRequest(Role.WORKER, 0), "w").member
        client.heartbeat(worker, MemberStats(metrics={name: 0.5}))
        client.leave(worker, f"{name}\nERROR forged")
        for flags in ((), ("--json",)):
            done = psctl_says("status", *flags, "--coordinator", coordinator.address, COLUMNS="300")
            assert done.exit_code == 0
            assert all(line.isprintable() for line in done.output.splitlines())
            assert not any(line.lstrip().startswith("ERROR") for line in done.output.splitlines())
            assert name.replace("\x1b", "\\x1b") in done.output.replace("\\\\", "\\")


def test_status_shows_a_model_that_diverges_and_its_check_notes_it():
    with running_coordinator(ClusterSettings()) as coordinator, CoordinatorClient(coordinator.address) as client:
        client.join(JoinRequest(Role.SHARD, 0, "127.0.0.1:4444"), "s")
        worker = client.join(JoinRequest(Role.WORKER, 0), "w").member
        client.heartbeat(worker, MemberStats(nonfinite=1))
        text = "the model diverges: worker 0 refused gradients that hold NaN or infinity; staleness is 0.0"
        done = psctl_says("status", "--coordinator", coordinator.address, COLUMNS="400")
        assert text in done.output
        checked = psctl_says("status", "--check", "-o", "json", "--coordinator", coordinator.address)
        assert checked.exit_code == 0
        assert text in checked.stderr
        (grown,) = json.loads(checked.stdout)["divergences"]
        assert (grown["member"]["role"], grown["what"], grown["value"]) == ("worker", "gradients", None)
        client.set_consistency(Consistency(Mode.SYNC))
        assert "diverges" not in psctl_says("status", "--coordinator", coordinator.address, COLUMNS="400").output


def test_a_divergence_is_listed_and_acknowledged_once():
    with running_coordinator(ClusterSettings()) as coordinator, CoordinatorClient(coordinator.address) as client:
        client.join(JoinRequest(Role.SHARD, 0, "127.0.0.1:4444"), "s")
        worker = client.join(JoinRequest(Role.WORKER, 0), "w").member

        def said(*arguments: str) -> str:
            done = psctl_says("divergence", *arguments, "--coordinator", coordinator.address)
            assert done.exit_code == 0
            return done.stdout

        assert said() == "no number is far above its history\n"
        assert json.loads(said("--acknowledge", "-o", "json")) == {"divergences": [], "acknowledged": False}
        client.heartbeat(worker, MemberStats(nonfinite=1))
        assert said().startswith("worker 0 refused gradients that hold NaN or infinity, since ")
        assert said("--acknowledge").endswith("\nacknowledged: usual from now on\n")
        client.heartbeat(worker, MemberStats(nonfinite=1))
        assert said() == "no number is far above its history\n"
        assert "diverges" not in psctl_says("status", "--coordinator", coordinator.address, COLUMNS="400").output
        client.heartbeat(worker, MemberStats(nonfinite=2))
        found = json.loads(said("--acknowledge", "-o", "json"))
        assert (found["divergences"][0]["what"], found["acknowledged"]) == ("gradients", True)


def test_checkpoints_lists_a_directory_with_steps_and_what_is_kept(tmp_path):
    assert psctl_says("checkpoints", str(tmp_path)).output == "no complete checkpoint\n"
    job = Job.of(shard_map_of(small_spec(), 1))
    folders = [job.save(tmp_path, now=float(now)).folder for now in range(3)]
    protect(tmp_path, 1.5, KeptMark("loss grew", "worker"))
    (folders[2] / "manifest.json").write_text("{")
    first, second, third = psctl_says("checkpoints", str(tmp_path)).output.splitlines()
    assert first.startswith("checkpoint-00000001, step 0, 0.0 MB, ")
    assert second.endswith("; kept: loss grew")
    assert third == "checkpoint-00000003, its manifest is damaged"
    told = json.loads(psctl_says("checkpoints", str(tmp_path), "-o", "json").output)["checkpoints"]
    assert [each["kept"] for each in told] == ["", "loss grew", ""]
    assert told[2] == {"folder": str(folders[2]), "step": None, "size_bytes": None, "at_seconds": None, "kept": ""}
    assert psctl_says("checkpoints", str(tmp_path / "nowhere")).exit_code == 2


def test_a_step_to_restore_that_is_no_number_is_wrong_usage(job):
    done = psctl_says("restore", "step=x", "--coordinator", job.address)
    assert done.exit_code == 2
    assert "a step of a checkpoint is a number" in done.output
    done = psctl_says("restore", "step=7", "--coordinator", job.address)
    assert done.exit_code == 1
    assert "this job has no place for checkpoints" in done.output


EVERY_COMMAND = [
    ("status",),
    ("mode", "async"),
    ("checkpoint",),
    ("restore",),
    ("move", "--balance"),
    ("drain", "0"),
    ("feed", "--table", "t"),
]


@pytest.mark.parametrize("command", EVERY_COMMAND, ids=lambda command: command[0])
def test_every_command_tells_four_ways_of_no_coordinator_apart_within_the_connect_time(command, monkeypatch):
    monkeypatch.setattr("ps_protocol.times.CONNECT_SECONDS", 0.1)
    refused = psctl_says(*command, "--coordinator", "127.0.0.1:1")
    assert (refused.exit_code, refused.output.count("\n")) == (1, 1)
    assert "nothing listens on port 1 there (connection refused)" in refused.output
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = psctl_says(*command, "--coordinator", f"127.0.0.1:{listener.getsockname()[1]}")
    assert (silent.exit_code, silent.output.count("\n")) == (1, 1)
    assert "takes connections and does not answer" in silent.output
    bad = psctl_says(*command, "--coordinator", "http://host:7000")
    assert bad.exit_code == 2
    assert "begins with a scheme" in bad.output

    def nobody(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    unknown = psctl_says(*command, "--coordinator", "nohost:7000")
    assert (unknown.exit_code, unknown.output.count("\n")) == (1, 1)
    assert "no host is known as 'nohost' here" in unknown.output


def test_a_command_that_takes_long_says_so_and_returns_or_raises_what_it_should(monkeypatch):
    monkeypatch.setattr("ps_protocol.times.HINT_SECONDS", 0.01)
    go = threading.Event()
    said = []

    def say(text, err):
        said.append(text)
        go.set()

    monkeypatch.setattr(connection.click, "echo", say)
    assert connection.patiently("writing", lambda: go.wait(60) and "done") == "done"
    assert re.fullmatch(r"writing for \d+ s", said[0])
    with pytest.raises(ZeroDivisionError):
        connection.patiently("dividing", lambda: 1 / 0)
