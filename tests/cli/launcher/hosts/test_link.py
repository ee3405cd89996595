"""A connection to a host without ssh: the host's program is a child, and what it starts is real. About 4 s of CPU."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ps_protocol.errors import ConfigError, InvalidRequest, PsError, Unavailable
from ps_server.cli.launcher.events import ProcessName, ProcessRole
from ps_server.cli.launcher.hosts import link as links
from ps_server.cli.launcher.hosts.fleet import PROGRAM
from ps_server.cli.launcher.hosts.link import HostLink
from ps_server.cli.launcher.hosts.messages import BEGINNING, Begin, Hello, Launch, encode, pack
from ps_server.cli.launcher.job_folder import JobFolder
from tests.cli.launcher.jobs import PATIENCE_SECONDS, alive, wait_until

HOST = (sys.executable, "-P", "-m", PROGRAM)
WORKER = ProcessName(ProcessRole.WORKER, 1)
COORDINATOR = ProcessName(ProcessRole.COORDINATOR)
IMPATIENT = """
from ps_protocol import times
from ps_server.cli.launcher.hosts import host_program
times.HANGS_SECONDS = 1.0
"""
PAUSE = "import os, signal; print(os.getpid(), flush=True); signal.pause()"


class Hosts:
    """Connections of one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.links: list[HostLink] = []

    def begin(
        self,
        silence: float = 60.0,
        script: str = "",
        data_dir: str = "",
        folder: str | None = None,
        checkpoint_dir: str = "",
    ) -> Begin:
        return Begin("h1", folder or str(self.folder), script, data_dir, "lock", silence, checkpoint_dir)

    def link(self, command=HOST, **begin) -> HostLink:
        self.links.append(HostLink(command, "/py", self.begin(**begin)))
        return self.links[-1]

    def fails(self, command=HOST, **begin) -> PsError:
        error = self.link(command, **begin).ready.exception(PATIENCE_SECONDS)
        assert isinstance(error, PsError)
        return error


@pytest.fixture
def hosts(tmp_path):
    made = Hosts(tmp_path)
    yield made
    for link in made.links:
        link.leave()
    for link in made.links:
        link.close()


def script(text: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", "-c", text)


def start(link, text, name=WORKER, files=None, **environment):
    return link.start(Launch(name, script(text), environment, files or {}), None)


def lines_of(process) -> list[str]:
    """All that it prints, to its end."""
    found: list[str] = []

    def ends() -> bool:
        found.extend(process.read() or [])
        return process.poll() is not None

    wait_until(ends, "the process ends")
    return found + process.read_rest()


def numbers(process, count: int) -> list[int]:
    """The first ones that it prints."""
    found: list[str] = []

    def printed() -> bool:
        found.extend(process.read() or [])
        return len(found) >= count

    wait_until(printed, "the process prints")
    return [int(line) for line in found]


def says(data: bytes) -> tuple[str, ...]:
    """A program of a host that says this and waits."""
    return script(f"import os, time; os.write(1, {data!r}); time.sleep(100)")


def test_a_process_has_its_variables_files_folder_output_and_exit_code(hosts):
    link = hosts.link()
    assert link.ready.result(PATIENCE_SECONDS).cores == len(os.sched_getaffinity(0))
    text = """
import os, stat, sys
path = os.environ['PS_TLS_KEY']
print(os.getcwd(), os.environ['A'], open(path).read(), oct(stat.S_IMODE(os.stat(path).st_mode)))
print(oct(stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode)), os.environ['PATH'] != '', flush=True)
print('x' * 200_000, file=sys.stderr)
sys.exit(7)
"""
    process = start(link, text, files={"PS_TLS_KEY": b"key"}, A="1")
    first, second, *rest = lines_of(process)
    assert first == f"{hosts.folder} 1 key 0o600"
    assert second == "0o700 True"
    assert (len("".join(rest)), {*"".join(rest)}) == (200_000, {"x"})
    assert (process.poll(), process.why) == (7, "")
    assert process.peak_bytes > 1 << 20


def test_what_is_started_before_the_host_is_ready_starts_then_and_signals_come_through(hosts):
    link = hosts.link()
    process = start(link, PAUSE)
    (pid,) = numbers(process, 1)
    assert alive(pid)
    process.send(signal.SIGTERM)
    lines_of(process)
    assert process.poll() == -signal.SIGTERM


def test_the_coordinator_serves_when_its_ready_file_says_so(hosts):
    text = "import pathlib, sys, time; pathlib.Path(sys.argv[2]).write_text('a:7\\n'); time.sleep(100)"
    link = hosts.link()
    link.start(Launch(COORDINATOR, script(text), {}), None)
    wait_until(lambda: link.coordinator == "a:7", "the address is told")


def test_a_program_that_is_not_there_is_a_process_that_failed(hosts):
    process = hosts.link().start(Launch(WORKER, ("/no/such",), {}), None)
    assert lines_of(process) == ["cannot run /no/such: No such file or directory"]
    assert process.poll() == 1


@pytest.mark.parametrize("how", ["leave", "close"])
def test_with_the_connection_everything_on_the_host_ends(hosts, how):
    link = hosts.link(("sh", "-c", f"cat | setsid {shlex.join(HOST)} | cat"))
    # A child of its own, in the group of the process.
    text = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {PAUSE!r}]); {PAUSE}"
    process = start(link, text)
    found = numbers(process, 2)
    getattr(link, how)()
    link.close()
    wait_until(lambda: not any(alive(pid) for pid in found), "they have ended")
    wait_until(lambda: process.poll() is not None, "the process counts as ended")
    assert process.poll() == 255
    assert "was lost with the connection to h1" in process.why
    assert start(link, PAUSE).poll() == 255


def test_ps_run_that_says_nothing_is_gone(hosts):
    begin = pack(hosts.begin(silence=6.0))
    with subprocess.Popen(HOST, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        program.stdin.write(begin + pack(Launch(WORKER, script(PAUSE), {})))
        program.stdin.flush()
        # Its input stays open: only the silence ends it.
        output = program.stdout.read()
        assert program.wait(PATIENCE_SECONDS) == 0
    assert output.startswith(BEGINNING)
    assert b'"alive"' in output


@pytest.mark.parametrize("received", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_ends_the_program_of_a_host_and_its_processes(hosts, received):
    link = hosts.link()
    process = start(link, "import os; print(os.getppid(), flush=True); " + PAUSE)
    program, pid = numbers(process, 2)
    os.kill(program, received)
    wait_until(lambda: not alive(pid), "the process has ended")
    lines_of(process)
    assert "was lost with the connection to h1" in process.why


def test_a_host_that_says_nothing_is_lost(hosts):
    link = hosts.link(says(BEGINNING + pack(Hello(links.version("torch-ps"))) + encode(READY)), silence=4.0)
    assert link.ready.result(PATIENCE_SECONDS).cores == 1
    process = start(link, PAUSE)
    lines_of(process)
    assert "no message for 4 s" in process.why


READY = {"kind": "ready", "cores": 1, "client_address": "", "server_address": ""}


def test_a_login_shell_may_print_before_the_program(hosts):
    noisy = script(f"import os, sys; os.write(1, b'welcome\\n'); os.execv(sys.executable, {list(HOST)!r})")
    assert hosts.link(noisy).ready.result(PATIENCE_SECONDS).cores


@pytest.mark.parametrize(
    ("command", "kind", "words"),
    [
        (says(BEGINNING + pack(Hello("0.0.7"))), ConfigError, "h1 has another version of torch-ps.*0.0.7"),
        (says(BEGINNING + b"\xff" * 80), InvalidRequest, "no message"),
        (script("import sys; print('Welcome'); sys.exit('broken')"), ConfigError, "ended with code 1.*broken"),
        (script("import sys; sys.exit(255)"), Unavailable, "h1: ssh failed"),
        (("/no/ssh", "h1"), ConfigError, "cannot run /no/ssh"),
    ],
)
def test_a_host_that_cannot_take_part_is_a_typed_error(hosts, command, kind, words):
    error = hosts.fails(command)
    assert isinstance(error, kind)
    with pytest.raises(kind, match=words):
        raise error


def test_a_host_that_never_answers_is_a_typed_error(hosts):
    error = hosts.fails(says(b"Password: "), silence=0.3)
    assert isinstance(error, Unavailable)
    assert "h1: no answer over ssh" in str(error)


def test_a_host_without_the_folder_or_the_script_says_so(hosts):
    assert "h1: the folder /no/such cannot be entered" in str(hosts.fails(folder="/no/such"))
    assert "h1: no such script: 'train.py'" in str(hosts.fails(script="train.py"))


def test_a_data_directory_is_locked_on_its_host_and_told(hosts, monkeypatch):
    link = hosts.link(data_dir="state")
    told = link.ready.result(PATIENCE_SECONDS)
    assert (told.data_dir, told.used_before) == (str(hosts.folder / "state"), False)
    with pytest.raises(ConfigError, match="in use by another ps-run"):
        JobFolder(hosts.folder / "state", wait_seconds=0.0, lock_name="lock")
    # Another host of the job, in a folder that both see.
    os.close(JobFolder(hosts.folder / "state", wait_seconds=0.0, lock_name="other").lock)
    link.leave()
    link.close()
    os.close(JobFolder(hosts.folder / "state", lock_name="lock").lock)


def test_a_coordinator_that_shows_no_life_is_told_with_its_number_and_ended_by_its_host(hosts, monkeypatch):
    link = hosts.link((sys.executable, "-P", "-c", f"{IMPATIENT}\nhost_program.main()"))
    process = start(link, "import os; os.write(int(os.environ['PS_LIFE_FD']), b'.')\n" + PAUSE, COORDINATOR)
    (pid,) = numbers(process, 1)
    wait_until(process.hangs, "its host says that it hangs")
    assert process.pid == pid
    # Longer, where the host was kept waiting.
    assert re.fullmatch(r"it has shown no life for \d+ s", process.hangs())
    process.send(signal.SIGKILL)
    wait_until(lambda: process.poll() is not None, "it has ended")
    assert process.poll() == -signal.SIGKILL


def test_a_host_that_cannot_write_checkpoints_says_so_before_anything_is_started(hosts, tmp_path):
    (tmp_path / "file").touch()
    error = hosts.fails(checkpoint_dir=str(tmp_path / "file" / "saved"))
    assert isinstance(error, ConfigError)
    assert error.message.startswith("h1: the checkpoint files at ")
    assert error.message.endswith("cannot be used: Not a directory")
    hosts.link(checkpoint_dir=str(tmp_path / "saved")).ready.result(PATIENCE_SECONDS)
    assert list((tmp_path / "saved").iterdir()) == []
