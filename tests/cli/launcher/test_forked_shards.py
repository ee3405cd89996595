"""Shards of ps-run that are forked: what they are told, how they end, and what is lost with what they are forked from.

The test process stands for ps-run. The process that forks has not imported torch: 0.4 s of CPU for each, and most
tests share one.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from ps_protocol.launch.commands import SHARD
from ps_server.cli.launcher import forks
from ps_server.cli.launcher.events import ProcessName, ProcessRole
from ps_server.cli.launcher.forks import ForkedChild, ForkServer, ForkState
from ps_server.cli.launcher.machines import ThisMachine
from tests.cli.launcher.jobs import ROOT, alive, wait_until
from tests.cli.launcher.training import UNDISTURBED, Training

LIGHT = "tests.cli.launcher.scripts.light_fork_server"
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protos'}", "PYTHONUNBUFFERED": "1"}
FLAGS = ("--log-level", "warning")
SHARDS = [ProcessName(ProcessRole.SHARD, index) for index in range(3)]


class Machine:
    """The machine, and what it reports."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.machine = ThisMachine(forks=True, say=self.said.append)
        self.children: list[ForkedChild] = []
        self.lines: dict[int, list[str]] = {}

    def start(self, index: int = 0, *flags: str, **environment: str) -> ForkedChild:
        command = [*SHARD, "--shard", str(index), "--coordinator", "127.0.0.1:9", *FLAGS, *flags]
        child = self.machine.start(SHARDS[index], command, ENVIRONMENT | environment, {}, None)
        assert isinstance(child, ForkedChild)
        self.children.append(child)
        self.lines[child.output] = []
        return child

    def begun(self, index: int = 0, *flags: str, **environment: str) -> tuple[ForkedChild, dict]:
        """A shard that runs, and what it tells."""
        child = self.start(index, *flags, **environment)
        return child, json.loads(self.line_of(child, "{"))

    def line_of(self, child: ForkedChild, begin: str) -> str:
        """The first line of what ``child`` writes that begins so."""
        found = self.lines[child.output]
        output = select.poll()
        output.register(child.output, select.POLLIN)

        def read() -> bool:
            if child.waits:
                child.poll()
            elif output.poll(0):
                found.extend(child.read() or ())
            return any(line.startswith(begin) for line in found)

        wait_until(read, f"'{begin}' is written")
        return next(line for line in found if line.startswith(begin))

    def end_of(self, child: ForkedChild) -> tuple[int, list[str]]:
        """Its exit code and all lines that it has written, but for what it tells."""
        codes: list[int | None] = []
        wait_until(lambda: codes.append(child.poll()) or codes[-1] is not None, "it has ended")
        self.children.remove(child)
        lines = self.lines.pop(child.output) + child.read_rest()
        assert codes[-1] is not None
        return codes[-1], [line for line in lines if not line.startswith("{")]

    @property
    def forks(self) -> ForkServer:
        assert self.machine._forks is not None
        return self.machine._forks

    def end_shards(self) -> None:
        for child in self.children:
            child.kill()
        self.children.clear()

    def close(self) -> None:
        self.end_shards()
        self.machine.close()


@pytest.fixture(scope="module")
def kept():
    """A machine whose shards are all forked from one process."""
    made = Machine()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(forks, "MODULE", LIGHT)
        made.begun(0)
    yield made
    made.close()


@pytest.fixture
def shared(kept):
    """``kept``, without the shards of other tests."""
    kept.end_shards()
    return kept


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(forks, "MODULE", LIGHT)
    made = Machine()
    yield made
    made.close()


def opened(pid: int) -> list[str]:
    """What the descriptors of a process are."""
    found = []
    for descriptor in list(Path(f"/proc/{pid}/fd").iterdir()):
        with suppress(FileNotFoundError):
            found.append(str(descriptor.readlink()))
    return found


def test_a_forked_shard_is_a_child_of_its_own_and_is_told_what_a_program_is_told(shared):
    before = time.time()
    child, told = shared.begun(1, "--threads", "3", MINE="1", PS_JOB="j")
    assert (told["pid"], told["parent"], told["group"]) == (child.pid, os.getpid(), child.pid)
    assert (told["shard"], told["coordinator"], told["folder"]) == (1, "127.0.0.1:9", str(Path.cwd()))
    assert told["argv"] == ["--shard", "1", "--coordinator", "127.0.0.1:9", *FLAGS, "--threads", "3"]
    assert told["threads"] == 1
    assert told["started"] >= before
    expected = ENVIRONMENT | {"MINE": "1", "PS_JOB": "j", "SET_BY_AN_IMPORT": "1"}
    assert told["environment"] | expected == told["environment"]
    # Nothing of a neighbour, and nothing that only the process it was forked from had.
    other, told = shared.begun(2, OTHER="1")
    assert {"MINE", "PS_JOB"}.isdisjoint(told["environment"])
    assert told["environment"]["OTHER"] == "1"
    assert other.pid != child.pid


def test_a_forked_shard_has_no_descriptor_of_its_neighbours_or_of_what_it_is_forked_from(shared):
    first, told = shared.begun(0)
    here = opened(shared.forks.pid)
    assert any(name.startswith("socket:") for name in here)
    output = f"pipe:[{os.fstat(first.output).st_ino}]"
    assert told["descriptors"].count(output) == 2
    _, told = shared.begun(1)
    assert output not in told["descriptors"]
    assert {name for name in here if name.startswith(("socket:", "/memfd:"))}.isdisjoint(told["descriptors"])
    wait_until(lambda: not any(name.startswith("pipe:") for name in opened(shared.forks.pid)), "it closes what it sent")
    assert len(opened(shared.forks.pid)) == 4  # standard input, output and error; the connection


def test_it_is_listed_as_the_program_that_it_would_be(shared):
    child, _ = shared.begun(1)
    assert child.pid is not None
    listed = psutil.Process(child.pid)
    assert listed.name() == "ps-server 1"
    shown = [word for word in listed.cmdline() if word]
    told = ("--shard", "1", "--coordinator", "127.0.0.1:9", *FLAGS)
    assert shown == [sys.executable, "-P", "-m", "ps_server.shard.main", *told]
    parent = [word for word in psutil.Process(shared.forks.pid).cmdline() if word]
    assert parent[:4] == [sys.executable, "-P", "-m", LIGHT]
    long = "x" * 10_000
    child, told = shared.begun(2, "--optimizers", "", "--advertise", f"{long}:1")
    assert told["argv"][-1] == f"{long}:1"
    assert child.pid is not None
    assert psutil.Process(child.pid).cmdline()[-1].startswith("xxx")


@pytest.mark.parametrize(("asked", "code"), [("0", 0), ("7", 7), ("raises", 1)])
def test_its_exit_code_is_seen(shared, asked, code):
    child, _ = shared.begun(ENDS=asked)
    ended, lines = shared.end_of(child)
    assert ended == code
    assert child.peak_bytes > 1 << 20
    assert (lines[-1:] == ["RuntimeError: as asked"]) == (asked == "raises")


def test_a_usage_error_is_that_of_the_program(shared):
    child = shared.start(0, "--no-such-flag")
    code, lines = shared.end_of(child)
    assert (code, child._popen) == (2, None)
    assert lines[0].startswith("Usage: python -m ps_server.shard.main")


def test_signals_reach_it_and_are_seen_as_its_end(shared):
    stopped, _ = shared.begun(0)
    killed, _ = shared.begun(1)
    stopped.send(signal.SIGTERM)
    killed.send(signal.SIGKILL)
    assert shared.end_of(stopped) == (0, ["stopped"])
    assert shared.end_of(killed) == (-signal.SIGKILL, [])


def test_what_imports_write_is_in_the_output_of_every_shard(machine):
    for index in range(2):
        child = machine.start(index, SAYS="a library warns")
        assert machine.line_of(child, "a library") == "a library warns"


def test_descriptors_that_it_inherits_stay_open_in_it(shared, tmp_path, monkeypatch):
    lock = tmp_path / "lock"
    with lock.open("w") as file:
        monkeypatch.setattr(shared.machine, "_server_descriptors", (file.fileno(),))
        _, told = shared.begun()
    assert str(lock) in told["descriptors"]


def test_it_waits_until_it_can_be_forked_and_a_signal_before_that_is_its_end(machine):
    child = machine.start(0, STOPS="1")
    assert child.waits
    assert machine.machine.look()
    assert child.poll() is None
    child.send(signal.SIGTERM)
    assert machine.machine.look()
    assert machine.end_of(child) == (-signal.SIGTERM, [])
    assert not machine.machine.look()
    assert machine.said == []


def test_shards_outlive_what_they_were_forked_from_and_the_next_one_has_a_new_one(machine):
    first, _ = machine.begun(0)
    lost = machine.forks
    os.kill(lost.pid, signal.SIGKILL)
    wait_until(lambda: machine.machine.look() or machine.said, "that is noticed")
    assert machine.said == ["the process that shards are forked from is lost; shards go on without it"]
    _, told = machine.begun(1)
    assert machine.forks is not lost
    assert not alive(lost.pid)
    assert told["parent"] == os.getpid()
    assert first.poll() is None
    first.send(signal.SIGTERM)
    assert machine.end_of(first)[0] == 0


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("THREAD", "1", " (imports have started 1 thread(s), which no fork takes along)"),
        ("FAILS", "1", " (ImportError: as asked)"),
        # The first one is that of a test.
        ("NO_FORK", "2", ""),
        ("NO_FORK", "3", ""),
    ],
)
def test_where_none_can_be_forked_shards_are_started_as_programs(machine, variable, value, why):
    child = machine.start(0, "--no-such-flag", **{variable: value})
    assert machine.end_of(child)[0] == 2
    assert child._popen is not None
    assert machine.said == [f"the process that shards are forked from is lost{why}; shards go on without it"]


def test_one_that_does_not_answer_is_killed_and_the_shard_is_started_as_a_program(machine, monkeypatch):
    machine.begun(0)
    monkeypatch.setattr("ps_protocol.times.CALL_SECONDS", 0.2)
    os.kill(machine.forks.pid, signal.SIGSTOP)
    child = machine.start(1, "--no-such-flag")
    assert child._popen is not None
    assert machine.said == [
        "the process that shards are forked from is lost (timed out); shards go on without it",
    ]
    assert machine.forks.look() is ForkState.LOST
    wait_until(lambda: not alive(machine.forks.pid), "it is killed")
    assert machine.end_of(child)[0] == 2


def test_what_was_forked_for_nobody_ends(shared):
    shared.begun(0)
    ours, theirs = socket.socketpair()
    with forks._adopting(), ours, theirs, Path(os.devnull).open("w") as nothing:
        socket.send_fds(shared.forks._socket, [b"1"], [theirs.fileno(), nothing.fileno()])
        theirs.close()
        pid = int.from_bytes(ours.recv(8), "big")
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert shared.forks.look() is ForkState.READY
    shared.begun(1)


def test_one_that_was_ended_is_not_lost(machine):
    child, _ = machine.begun(0)
    forks = machine.forks
    for _ in range(2):
        machine.machine.end_forks()
    assert forks.look() is ForkState.LOST
    wait_until(lambda: not alive(forks.pid), "it has ended")
    assert not machine.machine.look()
    assert machine.said == []
    assert child.poll() is None


def test_a_limit_of_resources_is_that_of_ps_run(machine):
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    asked = 1 << 22
    resource.setrlimit(resource.RLIMIT_STACK, (asked, hard))
    try:
        _, told = machine.begun()
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
    assert told["stack"] == asked


def forked_shards(job: Training) -> list[int]:
    """The numbers of its processes that are listed as a shard."""
    found = []
    for each in psutil.Process(job._process.pid).children():
        with suppress(psutil.NoSuchProcess):
            if each.name() == "ps-server 0" and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each.pid)
    return found


@pytest.mark.long
def test_a_whole_job_whatever_is_killed_of_it(training):
    """Interpreters of their own: 12 s of CPU."""
    flags = ("--data-dir", "kept")
    job = training(*flags, own_interpreters=True)
    job.says("half-way")
    processes = psutil.Process(job._process.pid).children(recursive=True)
    (forks,) = [each for each in processes if each.name() == "ps-servers"]
    (first,) = forked_shards(job)
    assert not forks.children()
    job.kill("shard")
    wait_until(lambda: forked_shards(job) not in ([], [first]), "it is there again")
    forks.kill()
    job.says("the process that shards are forked from is lost; shards go on without it")
    job.kill("shard")
    job.says("(restart 2 of 10)")
    processes += psutil.Process(job._process.pid).children(recursive=True)
    job.send(signal.SIGKILL)
    job.ends()
    wait_until(lambda: not any(alive(each.pid) for each in processes), "all of its processes have ended")
    again = training(*flags, own_interpreters=True)
    again.go_on()
    assert again.ends() == 0, again.output
    assert UNDISTURBED in again.output


@pytest.mark.long
def test_an_interrupted_job_ends_as_ever(training):
    """Interpreters of their own: 6 s of CPU."""
    job = training("--shards", "2", own_interpreters=True)
    job.says("half-way")
    processes = psutil.Process(job._process.pid).children(recursive=True)
    job.send(signal.SIGINT)
    assert job.ends() == 128 + signal.SIGINT, job.output
    assert "shard" not in job.output.partition("interrupted")[2], job.output
    assert not any(alive(each.pid) for each in processes)
