"""up.sh: what it says where it cannot work, and whole trainings on a real engine."""

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UP = ROOT / "deploy" / "up.sh"
#: Another run of these tests on the same engine has its own.
PROJECT = f"torch-ps-test-{os.getpid()}"
TRAINING_SECONDS = 900


def no_engine() -> str:
    """Why containers cannot run here; empty where they can."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    for command in (["docker", "compose", "version"], ["docker", "info"]):
        if subprocess.run(command, capture_output=True, timeout=20, check=False).returncode:
            return f"'{' '.join(command)}' fails"
    return ""


class Training:
    """One run of up.sh under a project name of its own; a thread reads its output as it comes."""

    def __init__(self, **environment: str) -> None:
        self.environment = {**os.environ, "COMPOSE_PROJECT_NAME": PROJECT, **environment}
        self.lines: list[str] = []
        self._grown = threading.Condition()
        self.process = subprocess.Popen(
            [UP],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._grown:
                # Compose 2.26 clears the line first, also where there is no terminal.
                self.lines.append(line.rstrip().removeprefix("\x1b[2K"))
                self._grown.notify_all()
        self.process.stdout.close()

    def says(self, wanted: Callable[[str], bool], what: str) -> None:
        """Wait for a line."""
        with self._grown:
            assert self._grown.wait_for(lambda: any(map(wanted, self.lines)), TRAINING_SECONDS), (
                f"{what}: {self.output}"
            )

    def trains(self) -> None:
        self.says(lambda line: line.startswith("cluster | ") and "worker 1 step" in line and "loss" in line, "progress")

    def ends(self) -> int:
        code = self.process.wait(TRAINING_SECONDS)
        self._reader.join()
        return code

    def compose(self, *arguments: str) -> str:
        command = ["docker", "compose", "--file", str(ROOT / "deploy" / "compose.yaml"), *arguments]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def kill(self, service: str) -> None:
        """Everything in the container but its first process and the killer; that needs no right on the host."""
        self.compose("exec", "-T", service, "sh", "-c", "kill -9 -1")

    def reached(self) -> float:
        """The test accuracy that worker 0 measured at the end."""
        accuracy = [line for line in self.lines if line.startswith("worker0") and "test accuracy" in line]
        assert accuracy, self.output
        return float(accuracy[0].partition("test accuracy ")[2].split()[0])

    def state(self) -> str:
        """The volume of the servers' state, empty when there is none."""
        command = ["docker", "volume", "ls", "--quiet", "--filter", f"name={PROJECT}_state"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def containers(self) -> str:
        return self.compose("ps", "--all", "--quiet")


@pytest.fixture
def start() -> Iterator[Callable[..., Training]]:
    """Starts a training; whatever is left of it goes at the end."""
    if reason := no_engine():
        pytest.skip(f"needs a Docker engine: {reason}")
    trainings: list[Training] = []

    def start(**environment: str) -> Training:
        trainings.append(Training(**environment))
        return trainings[-1]

    yield start
    for training in trainings:
        if training.process.poll() is None:
            os.killpg(training.process.pid, signal.SIGTERM)
            training.ends()
        training.compose("down", "--volumes")


def test_without_docker_it_says_so_in_one_line(tmp_path):
    for program in ("bash", "dirname"):
        (tmp_path / program).symlink_to(shutil.which(program) or "")
    done = subprocess.run([UP], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "cluster | docker is not installed; 'make train' runs the same job without containers\n"


def with_docker(folder: Path, condition: str) -> subprocess.CompletedProcess[str]:
    """up.sh with a program in place of docker, which fails unless ``condition`` holds."""
    for program in ("bash", "dirname"):
        (folder / program).symlink_to(shutil.which(program) or "")
    docker = folder / "docker"
    docker.write_text(f"#!{shutil.which('bash')}\n{condition}\n")
    docker.chmod(0o755)
    return subprocess.run([UP], env={"PATH": str(folder)}, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("failing", "says"), [("compose", "no compose plugin"), ("info", "engine does not answer")])
def test_an_engine_that_is_not_ready_is_said_in_one_line(tmp_path, failing, says):
    done = with_docker(tmp_path, f'[ "$1" != {failing} ]')
    assert done.returncode == 1
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_where_the_state_stays_is_said_although_containers_cannot_be_removed(tmp_path):
    done = with_docker(tmp_path, '[[ " $* " != *" up "* && " $* " != *" down "* ]]')
    assert done.returncode == 1
    assert "cluster | the containers did not come up\n" in done.stderr
    assert "cluster | not everything could be removed" in done.stderr
    assert "cluster | the state stays in the volume 'torch-ps_state'" in done.stdout


@pytest.mark.docker
def test_a_killed_worker_comes_back_and_the_training_reaches_its_accuracy(start):
    training = start(MODE="async")
    training.trains()
    training.kill("worker1")
    assert training.ends() == 0, training.output
    joined = [line for line in training.lines if "worker 1 joined as incarnation" in line]
    assert len(joined) == 2, training.output
    assert training.reached() >= 0.97
    assert training.containers() == ""
    assert training.state() == ""


@pytest.mark.docker
@pytest.mark.parametrize(
    ("server", "comes_back"), [("shard1", "shard 1 joined as incarnation"), ("coordinator", "coordinator serves at")]
)
def test_a_killed_server_comes_back_with_its_state_and_the_training_reaches_its_accuracy(start, server, comes_back):
    training = start(MODE="sync")
    training.trains()
    training.kill(server)
    assert training.ends() == 0, training.output
    assert len([line for line in training.lines if comes_back in line]) == 2, training.output
    # No script was started again: the workers waited.
    assert len([line for line in training.lines if "joined as incarnation" in line and "worker" in line]) == 2
    assert training.reached() >= 0.97
    assert training.containers() == ""


@pytest.mark.docker
def test_a_worker_that_keeps_failing_gives_its_exit_code_and_everything_is_taken_down(start, tmp_path):
    override = tmp_path / "override.yaml"
    override.write_text("services:\n  worker1:\n    command: [sh, -c, exit 7]\n")
    files = os.pathsep.join((str(ROOT / "deploy" / "compose.yaml"), str(override)))
    training = start(COMPOSE_FILE=files)
    assert training.ends() == 7, training.output
    assert "cluster | worker1 failed with exit code 7" in training.lines
    assert training.containers() == ""


@pytest.mark.docker
def test_a_shard_lost_without_its_state_ends_the_job_and_is_named(start):
    training = start(DURABILITY="memory")
    training.trains()
    training.kill("shard1")
    assert training.ends() == 137, training.output
    assert "cluster | shard1 failed with exit code 137" in training.lines
    assert training.containers() == training.state() == ""


@pytest.mark.docker
def test_an_interrupted_training_is_taken_down_and_the_next_call_goes_on_from_its_state(start):
    training = start()
    training.trains()
    os.killpg(training.process.pid, signal.SIGINT)
    assert training.ends() == 130, training.output
    assert training.containers() == ""
    assert training.state() == f"{PROJECT}_state"
    again = start()
    assert again.ends() == 0, again.output
    assert any("continuing from the state" in line for line in again.lines)
    assert not any("declared model" in line for line in again.lines)
    assert again.reached() >= 0.97
    assert again.state() == ""
