"""ps-run over real processes: exit codes, prefixes, and that nothing outlives it."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.cli.launcher.jobs import Job, alive, order, wait_until

WAITS = "import signal\nprint('waiting', flush=True)\nsignal.pause()\n"
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITS


def own_line(line: str) -> str:
    """What ps-run says in a line of its own, off a terminal: after its name, and date and time of day."""
    found = re.fullmatch(r"ps-run      \| \d{4}-\d\d-\d\d \d\d:\d\d:\d\d (.*)", line)
    assert found, line
    return found[1]


@pytest.fixture
def job(tmp_path):
    made = Job(tmp_path)
    yield made
    made.close()


def test_workers_that_succeed_end_the_job_with_0_and_their_lines_carry_their_names(job):
    script = "import sys\nprint('hello', sys.argv[1:])\nprint('oh', file=sys.stderr)"
    done = job.interpreted("--workers", "2", script=script, arguments=("--epochs", "3", "-m"))
    assert done.returncode == 0
    for worker in ("worker 0   ", "worker 1   "):
        assert f"{worker} | hello ['--epochs', '3', '-m']\n" in done.stdout
        assert f"{worker} | oh\n" in done.stdout
    assert "coordinator | stopped\n" in done.stdout
    first, *rest = [own_line(line) for line in done.stderr.splitlines()]
    assert first == "coordinator at 127.0.0.1:9: 1 shard(s), 2 worker(s), async"
    assert [re.sub(r"\d+:\d+", "TIME", line) for line in rest] == ["finished in TIME"]


@pytest.mark.parametrize(
    ("flags", "told"), [((), "None"), (("--per-host",), "1"), (("--no-per-host",), "0")], ids=["", "on", "off"]
)
def test_on_one_machine_workers_push_together_where_the_command_line_says_so(job, flags, told):
    done = job.run(*flags, "--workers", "2", script="print('told', os.environ.get('PS_PER_HOST'))")
    assert done.returncode == 0
    assert done.stdout.count(f"| told {told}\n") == 2


def test_in_json_every_line_is_one_object_whatever_the_script_prints(job):
    script = """
import json
print('plain \\x1b[2J text')
print('{"not": "a record"}')
print('{broken')
print(json.dumps({"time": "2026-11-22T15:04:05.678Z", "level": "info", "message": "mine\\nyours", "worker": 0}))
print('format', os.environ['PS_LOG_FORMAT'])
"""
    done = job.run("--log-format", "json", script=script)
    assert done.returncode == 0
    lines = done.stdout.splitlines() + done.stderr.splitlines()
    assert all(line.isprintable() for line in lines)
    said = [json.loads(line) for line in lines]
    assert all(each.keys() >= {"time", "level", "message"} for each in said)
    printed = [each["message"] for each in said if each.get("event") == "output" and each["role"] == "worker"]
    assert printed == ["plain \\x1b[2J text", '{"not": "a record"}', "{broken", "format json"]
    assert {each["worker"] for each in said if each.get("role") == "worker"} == {0}
    assert "mine\\nyours" in [each["message"] for each in said]
    own = [each["message"] for each in said if each.get("role") == "ps-run"]
    assert own[0].startswith("coordinator at 127.0.0.1:9")
    assert own[-1].startswith("finished in")


def test_an_address_of_metrics_that_the_coordinator_does_not_tell_is_said_and_the_job_goes_on(job):
    done = job.run("--log-format", "json", "--metrics-port", "0", script="print('trained')")
    assert done.returncode == 0
    (said,) = [line for line in map(json.loads, done.stderr.splitlines()) if line["event"] == "metrics"]
    assert said["message"].startswith("the address of the metrics is not known: ")


def test_the_first_failing_workers_code_is_the_jobs_and_its_last_words_come_before_the_verdict(job):
    script = f"if R == 'worker1':\n    print('dying'); raise SystemExit(7)\n{WAITS}"
    done = job.run("--workers", "2", script=script)
    assert done.returncode == 7
    assert "worker 1    | dying\n" in done.stdout
    _, why, how, what = map(own_line, done.stderr.splitlines())
    assert why == "worker 1 exited with code 7; stopping the job"
    assert how.startswith("ended with exit code 7 after ")
    assert what == "failures: worker 1 exited with code 7"


def test_a_killed_worker_ends_the_job_with_128_plus_the_signal(job):
    done = job.interpreted(script="os.kill(os.getpid(), 9)")
    assert done.returncode == 137
    assert re.search(
        r"worker 0 was killed by signal 9 \(SIGKILL: perhaps out of memory, its peak was 0\.0\d GB\)", done.stderr
    )


HANGS = """
import time
if not pathlib.Path('hangs').exists():
    pathlib.Path('hangs').touch()
    time.sleep(600)
print('another life')
"""


def test_a_worker_that_hangs_is_started_again_when_the_coordinator_asks_for_it(job):
    done = job.run("--restart-workers", "1", script=HANGS, WANTS="0")
    assert done.returncode == 0
    assert "worker 0 runs and is lost to the coordinator; it is killed" in done.stderr
    assert "worker 0    | another life\n" in done.stdout


SERVERS_HANG = """
import signal, time
first = (P / '{victim}').read_text()
os.kill(int(first), signal.SIGSTOP)
pathlib.Path('hangs').touch()
while (P / '{victim}').read_text() == first: time.sleep(0.02)
print('another', '{victim}')
"""


@pytest.mark.parametrize(("victim", "name"), [("shard0", "shard 0"), ("coordinator", "coordinator")])
def test_a_stopped_server_is_killed_and_started_again(job, victim, name):
    script = "import time\nwhile not (P / 'shard0').exists(): time.sleep(0.02)\n" + SERVERS_HANG.format(victim=victim)
    # Of a shard the coordinator's word comes first, however busy the machine.
    told, why = {"WANTS": "0"}, r"it has shown no life for \d+ s"
    if victim == "shard0":
        told, why = {"WANTS": "shard", "SILENT": "600"}, "the coordinator has lost it, for its lease ended"
    done = job.run("--data-dir", "kept", script=script, LIVES="1", **told)
    assert done.returncode == 0, done.stderr
    assert f"| another {victim}\n" in done.stdout
    assert re.search(f"{name} hangs: {why}; it is killed", done.stderr)
    assert f"{name} hung and was killed; starting it again (restart 1 of 10)" in done.stderr
    assert done.stderr.count(" hangs: ") == 1


def test_a_shard_that_is_stopped_before_it_has_joined_is_replaced_without_the_coordinators_word(job):
    script = "import time\nwhile not (P / 'shard0').exists(): time.sleep(0.02)\n" + SERVERS_HANG.format(victim="shard0")
    done = job.run("--data-dir", "kept", script=script, LIVES="1")
    assert done.returncode == 0, done.stderr
    assert re.search(r"shard 0 hangs: it has been stopped for \d+ s; it is killed", done.stderr)


def test_without_a_data_directory_a_stopped_server_ends_the_job(job):
    script = SERVERS_HANG.format(victim="coordinator")
    done = job.run(script=script, LIVES="1")
    assert done.returncode == 137
    assert "coordinator hung and was killed before the job was done; stopping the job" in done.stderr


def test_that_the_coordinator_cannot_be_asked_is_told_and_nothing_is_killed(job):
    script = HANGS.replace("time.sleep(600)", "\n    while not pathlib.Path('taken').exists(): time.sleep(0.02)")
    done = job.run("--restart-workers", "1", script=script, WANTS="refused")
    assert done.returncode == 0
    assert "processes that hang are not noticed, and the job cannot be scaled: GetWorkerRequest is not" in done.stderr
    assert "another life" in done.stdout


def test_long_lines_of_many_processes_are_never_mixed(job):
    script = "for i in range(300): print(R * 400)"
    done = job.run("--workers", "4", script=script)
    lines = [line for line in done.stdout.splitlines() if line.startswith("worker")]
    assert len(lines) == 1200
    for line in lines:
        name, _, text = line.partition(" | ")
        assert text == name.strip().replace(" ", "") * 400


def test_an_unfinished_last_line_is_shown_and_a_progress_bar_only_in_its_last_state(job):
    done = job.run(script="import sys; sys.stdout.write('1%\\r50%\\r100%\\nno newline')")
    assert "worker 0    | 100%\n" in done.stdout
    assert "worker 0    | no newline\n" in done.stdout
    assert "50%" not in done.stdout


def test_the_log_folder_gets_every_process_in_a_file_of_its_own(job):
    job.run("--workers", "2", "--log-dir", "logs", script="print('from', R)")
    assert (job.folder / "logs" / "worker-1.log").read_text() == "from worker1\n"
    assert (job.folder / "logs" / "coordinator.log").read_text() == "stopped\n"


def test_a_module_runs_as_python_would_run_it(job):
    (job.folder / "package").mkdir()
    (job.folder / "package" / "train.py").write_text("import sys; print(__name__, sys.argv[1:])")
    command = job.command("-m", script="")[:-1]
    done = job.call([*command, "package.train", "-x"])
    assert "worker 0    | __main__ ['-x']\n" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("missing.py",), "no such script: 'missing.py'"),
        (("-m", "missing_module.train"), "no module named 'missing_module'"),
        (("--python", "no-python", "script.py"), "no interpreter 'no-python'"),
        (("--backup", "1", "script.py"), "--backup has no effect in mode async"),
        (("--workers", "8:2", "script.py"), "0 <= MIN <= MAX"),
        (("--restart-servers", "1", "script.py"), "--restart-servers needs servers that keep their state"),
        (("--durability", "durable", "script.py"), "--durability durable needs a data directory"),
        (("--data-dir", "script.py/kept", "script.py"), "cannot be written"),
        (("--log-dir", "script.py/logs", "script.py"), "logs cannot be written: Not a directory"),
        (("--checkpoint-seconds", "5", "script.py"), "--checkpoint-seconds without --checkpoint-dir"),
        (
            ("--checkpoint-dir", "saved", "--restore", "step=x", "script.py"),
            "Error: a step of a checkpoint is a number",
        ),
        (("--shards", "1000000", "script.py"), "1000000 is not in the range 1<=x<=4096"),
        (("--workers", "1000000", "script.py"), "expected 0 <= MIN <= MAX <= 65536"),
        (("--evaluators", "1000000", "script.py"), "1000000 is not in the range 0<=x<=65536"),
    ],
)
def test_a_command_that_cannot_work_is_refused_before_anything_starts(job, arguments, says):
    command = job.command(script="")[:-1]
    done = job.call([*command, *arguments])
    assert done.returncode == 2
    assert says in done.stderr
    assert not list(job.pids.iterdir())


@pytest.mark.parametrize("victim", ["shard0", "coordinator"])
def test_a_killed_server_ends_the_job_and_is_named(job, victim):
    process = job.start(script=WAITS)
    job.has_started("coordinator", "shard0", "worker0")
    os.kill(job.pid(victim), signal.SIGKILL)
    code, output = process.ends()
    assert code == 137
    assert f"{victim.replace('0', ' 0')} was killed by signal 9 (SIGKILL: perhaps out of memory" in output
    assert "before the job was done" in output
    job.leaves_nothing()


def test_ctrl_c_interrupts_each_worker_once_and_servers_stay_until_they_have_left(job):
    script = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
(P / ('waiting-' + R)).write_text(str(os.getpid()))
signal.sigwait({signal.SIGINT})
again = signal.sigtimedwait({signal.SIGINT}, 0.2)
os.kill(int((P / 'shard0').read_text()), 0)
print('interrupted', 'twice' if again else 'once', 'with the shard alive')
"""
    process = job.start("--workers", "2", script=script)
    job.has_started("waiting-worker0", "waiting-worker1", "shard0")
    os.killpg(process.pid, signal.SIGINT)
    code, output = process.ends()
    assert code == 130
    assert output.count("interrupted once with the shard alive") == 2
    job.leaves_nothing()


def test_a_second_ctrl_c_kills_what_does_not_leave(job):
    process = job.start(script=f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{STUBBORN}")
    while "waiting" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    while "interrupted" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    assert process.ends()[0] == 130
    job.leaves_nothing()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_ps_run_takes_every_process_with_it(job, signum, code):
    process = job.start("--workers", "2", script=WAITS)
    job.has_started("worker0", "worker1", "shard0")
    process.send_signal(signum)
    assert process.ends()[0] == code
    job.leaves_nothing()


def test_nothing_outlives_a_ps_run_that_was_killed(job):
    process = job.start("--workers", "2", "--evaluators", "1", script=STUBBORN)
    job.has_started("coordinator", "shard0", "worker0", "worker1", "evaluator0")
    process.kill()
    process.ends()
    job.leaves_nothing()


def test_the_folder_of_a_ps_run_that_was_killed_is_removed_by_the_next_and_that_of_a_live_one_stays(job, tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    job.temporary = str(temporary)

    def folders() -> set[str]:
        return {path.name for path in temporary.iterdir() if path.name.startswith("torch-ps-run-")}

    process = job.start("--tls", script=WAITS)
    job.has_started("worker0")
    (left,) = folders()
    assert list((temporary / left).glob("tls/*.key"))
    process.kill()
    process.ends()
    job.leaves_nothing()
    lives = job.start(script=WAITS)
    while "waiting" not in lives.stdout.readline():
        pass
    (kept,) = folders()
    assert kept != left
    (tmp_path / "other").mkdir()
    other = Job(tmp_path / "other")
    other.temporary = str(temporary)
    assert other.run(script="print('done')").returncode == 0
    assert folders() == {kept}
    lives.send_signal(signal.SIGTERM)
    lives.ends()
    assert folders() == set()


LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_limit_of_open_files_that_is_too_low_is_told_with_the_number_that_is_needed(job):
    command = job.command("--workers", "5", script="print('trained')")
    limited = [command[0], "-c", LIMITED, *command[1:]]
    env = job.environment()
    done = subprocess.run(limited, cwd=job.folder, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "ps-run with 7 processes may not open as many files as it needs" in done.stderr
    assert "expected: 85 or more; actual: a limit of 24; remedy: raise the limit (ulimit -n 85" in done.stderr


@pytest.mark.parametrize("process", ["coordinator", "shard 0", "worker 0"])
def test_a_process_that_cannot_be_started_is_told_and_ends_the_job(job, process):
    done = job.run("--no-fork-shards", script=WAITS, REFUSED=process)
    assert done.returncode == 126
    assert f"{process} cannot be started: Resource temporarily unavailable" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_coordinator_that_never_served_is_not_asked_at_the_end(job):
    process = job.start(script=WAITS, UNREADY="1")
    job.has_started("coordinator")
    process.send_signal(signal.SIGTERM)
    code, output = process.ends()
    assert code == 143
    first, second, last = output.splitlines()
    assert own_line(first) == "received SIGTERM; stopping the job"
    assert second == "coordinator | stopped"
    assert own_line(last).startswith("ended with exit code 143 after")


def test_what_a_script_started_ends_with_it(job):
    script = """
import subprocess, sys
child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])
(P / 'helper').write_text(str(child.pid))
"""
    assert job.run(script=script).returncode == 0
    assert (job.pids / "helper").exists()


def test_a_reader_that_goes_away_ends_the_job(job):
    process = job.start(script="import signal\nwhile True: print('x' * 1000)")
    job.has_started("worker0")
    process.stdout.readline()
    process.stdout.close()
    assert process.wait() == 128 + signal.SIGPIPE
    job.leaves_nothing()


def test_the_interpreter_of_the_workers_can_be_chosen(job):
    other = job.folder / "python"
    other.write_text(f'#!/bin/sh\necho chosen\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    done = job.run("--python", str(other), script="")
    assert "worker 0    | chosen\n" in done.stdout


SERVES = """
import signal
print('begun', flush=True)
signal.pause()
"""


def test_workers_begin_and_end_as_the_coordinator_tells_and_the_job_ends_when_it_says_so(job):
    process = job.start("--workers", "1:3", script=SERVES)
    job.has_started("worker0", "shard0")
    order(job, number=1, ranks=[0, 1, 2])
    job.has_started("worker1", "worker2")
    order(job, number=2, ranks=[0], live_ranks=[0])
    wait_until(lambda: not alive(job.pid("worker1")) and not alive(job.pid("worker2")), "two have ended")
    order(job, number=3, ranks=[], live_ranks=[])
    wait_until(lambda: not alive(job.pid("worker0")), "the last one has ended")
    assert alive(job.pid("shard0"))
    order(job, number=3, ranks=[], finished=True)
    code, output = process.ends()
    assert code == 0, output
    assert "worker 2 is ended: the job is to have fewer" in output
    assert "failures" not in output
    job.leaves_nothing()


def test_a_job_without_workers_serves_until_it_is_told_to_end(job):
    process = job.start("--workers", "0", script="")
    job.has_started("shard0")
    order(job, number=1, shards=[0, 1], added_shards=[1], live_shards=[0])
    job.has_started("shard1")
    order(job, number=2, shards=[0], live_shards=[0, 1])
    wait_until(lambda: not alive(job.pid("shard1")), "the second shard has ended")
    os.kill(process.pid, signal.SIGTERM)
    code, output = process.ends()
    assert code == 128 + signal.SIGTERM, output
    assert "workers that come and go" in output
    job.leaves_nothing()
