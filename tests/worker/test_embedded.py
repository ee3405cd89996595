"""A script without a coordinator's address runs with servers of its own, and leaves none behind. 6 CPU seconds."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import ps_worker
from ps_protocol.launch import shim
from ps_protocol.security.settings import SecuritySettings
from ps_worker import embedded
from ps_worker.embedded import EmbeddedCluster
from ps_worker.session.config import runs_alone
from tests.recovery.zygote import PYTHON, shared
from tests.support.shards import wait_until
from tests.worker.jobs import running_job

#: Stands for a server: writes its ready file, and ends at SIGTERM.
SERVER = """
import pathlib, signal, sys
if "dies" in sys.argv:
    print("no memory left", file=sys.stderr)
    sys.exit(3)
pathlib.Path(sys.argv[sys.argv.index("--ready-file") + 1]).write_text("127.0.0.1:9\\n")
signal.pause()
"""

#: A script whose servers are those; prints their numbers, then does what it is told.
SCRIPT = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv[1])
from ps_worker.embedded import EmbeddedCluster
from tests.worker.test_embedded import use_light_servers
use_light_servers()
started = EmbeddedCluster.start(60.0)
with open(sys.argv[2] + ".part", "w") as file:
    json.dump([server.pid for server in started._servers], file)
import os; os.rename(sys.argv[2] + ".part", sys.argv[2])
if sys.argv[3] == "error":
    raise ValueError("the script's own")
import time
while True:
    time.sleep(0.1)  # a signal just before signal.pause() would be seen only with the next one
"""


def use_light_servers(more: tuple[str, ...] = ()) -> None:
    command = shim.command
    shim.command = lambda program: command([sys.executable, "-S", "-c", SERVER, *program[4:], *more])


@pytest.fixture
def light_servers(monkeypatch):
    monkeypatch.setattr(shim, "command", shim.command)
    return use_light_servers


@pytest.fixture
def alone(monkeypatch):
    """The environment of a shell."""
    for name in [name for name in os.environ if name.startswith("PS_") or name == "TF_CONFIG"]:
        monkeypatch.delenv(name)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(map(lives, pids)):
        assert time.monotonic() < deadline, f"processes {pids} live"
        time.sleep(0.02)


def is_server(process: psutil.Process) -> bool:
    try:
        return "ps_server." in " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return False


def test_a_script_without_an_address_trains_with_servers_of_its_own(alone, capfd):
    with ps_worker.connect() as cluster:
        assert (cluster.rank, cluster.world_size) == (0, 1)
        # Other tests in this process may have children of their own.
        servers = [each for each in psutil.Process().children() if is_server(each)]
        assert len(servers) == 2
        model, reference = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        reference.load_state_dict(model.state_dict())
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        plain = torch.optim.SGD(reference.parameters(), lr=0.1)
        for each, its in ((model, optimizer), (reference, plain)):
            for step in range(3):
                its.zero_grad()
                each(torch.ones(4, 3) * step).square().sum().backward()
                its.step()
        assert torch.equal(model.weight, reference.weight)
    wait_until_gone([each.pid for each in servers])
    # On a busy machine a server may also say that it had to wait for a core.
    said = [line for line in capfd.readouterr().err.splitlines() if "stood still for" not in line]
    assert said == ["torch-ps: no coordinator is named; this script runs with a cluster of its own"]


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_a_step_fails_at_once_when_a_server_of_the_scripts_own_is_killed(alone, number):
    with ps_worker.connect(reconnect_timeout_seconds=600) as cluster:
        model = torch.nn.Linear(3, 2)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        os.kill(cluster._embedded._servers[number].pid, signal.SIGKILL)
        with pytest.raises(ps_worker.StateLost, match=r"was killed by signal 9.*its log") as raised:
            list(iter(optimizer.step, "never"))
        assert "ps-run --data-dir" in raised.value.remedy


def test_a_step_does_not_wait_for_a_shard_that_is_known_to_be_gone():
    ended = []

    def check():
        if ended:
            raise ps_worker.StateLost("ended")

    with running_job() as job:
        cluster = job.cluster(rank=0)
        cluster._session.check_own_servers = check
        model = torch.nn.Linear(3, 2)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        job.stop_shard(0)
        cluster._session.progress.hint = lambda text: ended.append(text)
        with pytest.raises(ps_worker.StateLost, match="ended"):
            optimizer.step()
        assert len(ended) == 1


@pytest.mark.parametrize("end", ["error", "interrupt", "kill"])
def test_servers_end_with_the_script_however_it_ends(tmp_path, end):
    written = tmp_path / "pids"
    arguments = ["-c", SCRIPT, str(Path(__file__).parents[2]), str(written), end]
    with Path(os.devnull).open("r+") as nothing:
        script = shared().start(PYTHON, arguments, {}, [nothing.fileno()] * 3)
    deadline = time.monotonic() + 60
    while not written.exists():
        assert time.monotonic() < deadline
        assert end == "error" or script.poll() is None
        time.sleep(0.02)
    pids = json.loads(written.read_text())
    if end != "error":
        script.send(signal.SIGKILL if end == "kill" else signal.SIGINT)
    assert script.wait(60) != 0
    wait_until_gone(pids)


def test_close_ends_both_and_may_be_repeated(light_servers):
    light_servers()
    started = EmbeddedCluster.start(60.0)
    pids = [server.pid for server in started._servers]
    assert started.address == "127.0.0.1:9"
    assert len(pids) == 2
    started.close()
    started.close()
    wait_until_gone(pids)


def test_a_server_that_does_not_start_is_named_with_its_end(light_servers):
    light_servers(("dies",))
    named = "the coordinator of this script's own cluster exited with code 3.*its log ends with: no memory left"
    with pytest.raises(ps_worker.Unavailable, match=named):
        EmbeddedCluster.start(60.0)


def test_a_server_that_ends_later_is_named_at_the_next_check(light_servers):
    light_servers()
    started = EmbeddedCluster.start(60.0)
    try:
        started.check()
        shard = started._servers[1]
        os.kill(shard.pid, signal.SIGKILL)
        wait_until(lambda: bool(shard.ended))
        with pytest.raises(ps_worker.StateLost, match="the shard of this script's own cluster was killed by signal 9"):
            started.check()
    finally:
        started.close()


def test_a_server_that_takes_too_long_is_an_error_with_its_remedy(light_servers):
    light_servers()
    with pytest.raises(ps_worker.Unavailable, match="PS_CONNECT_TIMEOUT"):
        EmbeddedCluster.start(0.0)


def test_an_interpreter_that_cannot_be_started_is_a_typed_error(monkeypatch):
    def refuse(program):
        raise OSError("no memory")

    monkeypatch.setattr(shim, "command", refuse)
    with pytest.raises(ps_worker.Unavailable, match="cannot be started: no memory"):
        EmbeddedCluster.start(60.0)


def test_servers_that_are_not_installed_are_a_typed_error(monkeypatch, alone):
    found = importlib.util.find_spec
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None if name == "numba" else found(name))
    with pytest.raises(ps_worker.ConfigError, match=r"no module named numba.*torch-ps\[server\]"):
        ps_worker.connect()


@pytest.mark.parametrize(
    ("environ", "role", "rank", "security"),
    [
        ({"PS_COORDINATOR": "host:1"}, None, None, None),
        ({"TF_CONFIG": "{}"}, None, None, None),
        ({"PS_ROLE": "evaluator"}, None, None, None),
        ({"PS_RANK": "1"}, None, None, None),
        ({"RANK": "0", "WORLD_SIZE": "2"}, None, None, None),
        ({"PS_TOKEN": "worker:a:" + "0" * 32}, None, None, None),
        ({}, "evaluator", None, None),
        ({}, None, 1, None),
        ({}, None, None, SecuritySettings()),
    ],
)
def test_what_names_a_job_does_not_run_alone(environ, role, rank, security):
    assert runs_alone({}, None, None, None)
    assert runs_alone({"RANK": "0", "WORLD_SIZE": "1"}, None, None, None)
    assert not runs_alone(environ, role, rank, security)
