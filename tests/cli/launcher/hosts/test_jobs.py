"""ps-run --hosts over a real sshd, with fake servers: it begins, ends and fails as a job of this machine does.

About 10 s of CPU, most of it in ssh and sshd.
"""

from __future__ import annotations

import os
import re
import signal

import psutil
import pytest

from tests.cli.launcher.hosts.sshd import Sshd, no_sshd
from tests.cli.launcher.jobs import Job, alive, order, wait_until

pytestmark = pytest.mark.skipif(bool(no_sshd()), reason=no_sshd() or "sshd is here")

WAITS = "import signal\nprint('waiting', flush=True)\nsignal.pause()\n"
#: What the hosts' environment lacks; sshd gives them little of its own.
ENVIRONMENT = ("-x", "PIDS", "-x", "PYTHONPATH")


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    started = Sshd(tmp_path_factory.mktemp("sshd"))
    yield started
    started.close()


@pytest.fixture
def job(tmp_path):
    made = Job(tmp_path)
    yield made
    made.close()


def over(sshd: Sshd, hosts: str, *flags: str) -> tuple[str, ...]:
    return ("--hosts", hosts, "--ssh", sshd.command, *ENVIRONMENT, *flags)


def test_roles_are_spread_output_has_names_and_nothing_is_left(job, sshd):
    script = """
import sys, time
while not (P / 'shard1').exists(): time.sleep(0.02)
print(R, os.environ['OMP_NUM_THREADS'], os.environ['SSH_CONNECTION'].split()[2], os.environ['PS_COORDINATOR'])
print('args', sys.argv[1:])
"""
    flags = over(sshd, "h0,h1:2", "--shards", "2", "--log-dir", "logs")
    done = job.run(*flags, "--env", "OMP_NUM_THREADS=5", script=script, arguments=("--a b", "$HOME", "'"))
    assert done.returncode == 0, done.stderr
    assert "worker 0    | worker0 5 127.0.0.1 127.0.0.1:9\n" in done.stdout
    assert "worker 1    | worker1 5 127.0.0.2 127.0.0.1:9\n" in done.stdout
    assert "worker 2    | worker2 5 127.0.0.2 127.0.0.1:9\n" in done.stdout
    assert done.stdout.count("""| args ['--a b', '$HOME', "'"]\n""") == 3
    assert "shard 1     | stopped\n" in done.stdout
    assert "hosts: h0: coordinator, shard 0, worker 0; h1: shard 1, worker 1, 2" in done.stderr
    assert "worker2 5" in (job.folder / "logs" / "worker-2.log").read_text()


def test_a_killed_worker_is_started_again_on_its_host(job, sshd):
    script = """
first = not pathlib.Path('seen').exists()
pathlib.Path('seen').touch()
if first: os.kill(os.getpid(), 9)
print('second life on', os.environ['SSH_CONNECTION'].split()[2])
"""
    done = job.run(*over(sshd, "h0:0,h1:1", "--restart-workers", "1"), script=script)
    assert done.returncode == 0
    assert "worker 0    | second life on 127.0.0.2\n" in done.stdout
    assert re.search(r"worker 0 was killed by signal 9 .*\(restart 1 of 1\)", done.stderr)


@pytest.mark.parametrize(
    ("received", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)]
)
def test_signals_end_every_process_on_every_host(job, sshd, received, code):
    process = job.start(*over(sshd, "h0,h1"), script=WAITS)
    job.has_started("worker0", "worker1", "coordinator", "shard0")
    os.kill(process.pid, received)
    ended, output = process.ends()
    assert ended == code, output
    job.leaves_nothing()


def test_a_killed_ps_run_leaves_nothing_on_any_host(job, sshd):
    process = job.start(*over(sshd, "h0,h1"), script=WAITS)
    job.has_started("worker0", "worker1", "coordinator", "shard0")
    os.kill(process.pid, signal.SIGKILL)
    process.ends()
    job.leaves_nothing()


def test_a_host_whose_connection_breaks_is_reached_again_and_its_worker_started_again(job, sshd):
    script = """
import time
first = not pathlib.Path(R + 'seen').exists()
pathlib.Path(R + 'seen').touch()
if R == 'worker1' and not first:
    pathlib.Path('over').touch()
while not pathlib.Path('over').exists():
    time.sleep(0.05)
"""
    process = job.start(*over(sshd, "h0,h1", "--restart-workers", "1"), script=script)
    job.has_started("worker0", "worker1")
    first = job.pid("worker1")
    # The sshd of the connection to h1: the one above its worker that is the highest.
    above = [each for each in psutil.Process(first).parents() if each.name() == "sshd" and each.pid != sshd.pid]
    above[-1].kill()
    wait_until(lambda: not alive(first), "the worker of the lost host has ended")
    ended, output = process.ends()
    assert ended == 0, output
    assert re.search(r"worker 1 was lost with the connection to h1 .*starting it again", output)
    job.leaves_nothing()


@pytest.mark.parametrize(
    ("hosts", "code", "words"),
    [
        ("h0,stranger", 2, "stranger: ssh failed; actual: .*Host key verification failed.*known_hosts"),
        ("h0,keyless", 2, "keyless: ssh failed; actual: .*Permission denied.*ssh-copy-id"),
        ("h0,closed", 1, "closed: ssh failed; actual: .*Connection refused"),
    ],
)
def test_a_host_that_cannot_take_part_is_one_typed_error_and_nothing_is_started(job, sshd, hosts, code, words):
    done = job.run(*over(sshd, hosts), script=WAITS)
    assert done.returncode == code
    (error,) = done.stderr.splitlines()
    assert re.match(f"Error: {words}", error), error
    assert not list(job.pids.iterdir())


def test_an_interpreter_without_torch_ps_is_a_typed_error(job, sshd):
    (job.folder / "python").write_text("#!/bin/sh\nexec " + psutil.Process().exe() + ' -I -S "$@"\n')
    (job.folder / "python").chmod(0o755)
    done = job.run(*over(sshd, "h0"), "--python", str(job.folder / "python"), script=WAITS)
    assert done.returncode == 2
    assert re.match(r"Error: h0: torch-ps is not installed for .*/python", done.stderr), done.stderr
    done = job.run(*over(sshd, "h0"), "--python", "/no/python", script=WAITS)
    assert re.match(r"Error: h0: no interpreter /no/python", done.stderr), done.stderr


def test_workers_begin_on_hosts_with_free_slots_and_end_there(job, sshd):
    process = job.start(*over(sshd, "h0,h1:2", "--workers", "1:3"), script=WAITS)
    job.has_started("worker0", "shard0")
    order(job, number=1, ranks=[0, 1, 2])
    job.has_started("worker1", "worker2")
    order(job, number=2, ranks=[0], live_ranks=[0])
    wait_until(lambda: not alive(job.pid("worker1")) and not alive(job.pid("worker2")), "two have ended")
    order(job, number=3, ranks=[])
    wait_until(lambda: not alive(job.pid("worker0")), "the last one has ended")
    order(job, number=3, ranks=[], finished=True)
    code, output = process.ends()
    assert code == 0, output
    job.leaves_nothing()
