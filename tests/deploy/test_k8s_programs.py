"""Commands, flags and variables of the Kubernetes manifests are those of the programs. Less than 2 s of CPU."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import click
import pytest

from ps_server.cli.options.storage import Durability, StorageOptions
from ps_server.coordinator.config import configure
from ps_server.coordinator.elasticity.engines import kubernetes
from ps_server.entry import MODULES
from ps_server.settings import configured
from ps_worker.session.config import WorkerConfig
from ps_worker.times import TOUCH_SECONDS
from tests.deploy.manifests import ROOT, Pod, each_pod, pods

#: Variables of the manifests that are not of torch-ps.
OTHERS = {"POD_NAME", "JOBSET_NAME", "NUMBA_CACHE_DIR", "OMP_NUM_THREADS"}


def command_of(pod: Pod) -> tuple[click.Command, list[str]]:
    """The program of a server and its arguments; a shell that runs it is left out."""
    program, *arguments = pod.command
    if program == "sh":
        flag, script, program, *arguments = arguments
        assert flag == "-c"
        assert '\n"$0" "$@" & pid=$!\n' in script
    command: click.Command = importlib.import_module(MODULES[program]).main
    return command, arguments


def variables_of(command: click.Command) -> set[str]:
    """Those that the program takes options from."""
    prefix = command.context_settings["auto_envvar_prefix"]
    named = set()
    for parameter in command.params:
        given = parameter.envvar or []
        named |= {given} if isinstance(given, str) else set(given)
        named.add(f"{prefix}_{parameter.name}".upper())
    return named


def literals(*folders: str) -> set[str]:
    """Names of variables in the source: what processes read besides options."""
    found: set[str] = set()
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            found |= set(re.findall(r'"(PS_[A-Z_]+)"', path.read_text()))
    return found


IN_PROTOCOL = literals("protos/ps_protocol")
IN_WORKER = literals("ps_worker") | IN_PROTOCOL


def unknown(pod: Pod) -> set[str]:
    """Variables of the pod that its program does not read."""
    known = IN_WORKER if pod.component == "worker" else IN_PROTOCOL | variables_of(command_of(pod)[0])
    if pod.component == "coordinator":
        # Of psctl, for people in the pod.
        known |= literals("ps_server/cli/psctl")
    return pod.environment.keys() - known - OTHERS


def parsed(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the program makes of the pod's command line and environment. Raises click.UsageError."""
    for name in [name for name in os.environ if name.startswith("PS_")]:
        monkeypatch.delenv(name)
    for name, value in pod.environment.items():
        monkeypatch.setenv(name, value)
    command, arguments = command_of(pod)
    return command.make_context("program", arguments, **command.context_settings).params


@pytest.mark.parametrize("pod", each_pod("coordinator", "shard", "standby", "worker"))
def test_every_variable_is_one_that_its_program_reads(pod):
    assert unknown(pod) == set()


@pytest.mark.parametrize(
    ("component", "typo"),
    [("coordinator", "PS_COORDINATOR_SHARD"), ("shard", "PS_SERVER_DURABLE"), ("worker", "PS_RANKS")],
)
def test_a_variable_with_a_typo_is_noticed(component, typo):
    pod = next(each for each in pods("base") if each.component == component)
    pod.container["env"].append({"name": typo, "value": "1"})
    assert unknown(pod) == {typo}


def test_a_flag_with_a_typo_is_noticed(monkeypatch):
    pod = next(each for each in pods("base") if each.component == "shard")
    pod.container["args"][0] = "--bnd"
    with pytest.raises(click.UsageError, match="--bnd"):
        parsed(pod, monkeypatch)


@pytest.mark.parametrize("pod", each_pod("coordinator"))
def test_the_coordinator_takes_its_options(pod, monkeypatch):
    account = kubernetes.Account("https://10.0.0.1:443", "training", Path("token"))
    monkeypatch.setattr(kubernetes.Account, "of_pod", lambda environment: account)
    options = parsed(pod, monkeypatch)
    config = configure(options, given=set(), kept=None)
    assert config.cluster.expected_shards == int(pod.environment["PS_COORDINATOR_SHARDS"])
    least, _, most = pod.environment["PS_COORDINATOR_WORKERS"].partition(":")
    number = (0, int(least), int(most)) if most else (int(least), 0, 0)
    cluster = config.cluster
    assert (cluster.expected_workers, cluster.least_workers, cluster.most_workers) == number
    assert config.bind == "0.0.0.0"
    listens = {"grpc": options["port"], "metrics": int(options["metrics_port"])}
    assert {each["name"]: each["containerPort"] for each in pod.container.get("ports", ())} in (listens, {})
    # A folder of the journal: what is lost without it is the job.
    assert options["data_dir"]


@pytest.mark.parametrize("pod", each_pod("shard", "standby"))
def test_a_shard_takes_its_options(pod, monkeypatch):
    options = parsed(pod, monkeypatch)
    config = configured(StorageOptions, options).config()
    assert config.durability is Durability.DURABLE
    assert options["bind"] == "0.0.0.0"
    assert options["advertise"].endswith(f":{options['port']}")
    assert options["standby"] == ("standby" in pod.name or pod.environment.get("PS_SERVER_STANDBY") == "1")
    listens = {"grpc": options["port"], "bulk": int(options["bulk_ports"]), "metrics": int(options["metrics_port"])}
    assert {each["name"]: each["containerPort"] for each in pod.container.get("ports", ())} in (listens, {})
    if "PS_SERVER_CHECKPOINT_DIRS" in pod.environment:
        assert [str(each) for each in options["checkpoint_dirs"]] == ["/checkpoints"]


@pytest.mark.parametrize("pod", each_pod("worker"))
def test_a_worker_takes_its_settings_and_runs_an_example_of_the_image(pod):
    config = WorkerConfig.from_environment(pod.environment)
    assert config.rank == int(pod.environment["PS_RANK"])
    assert config.coordinator.endswith(":7000")
    assert config.reconnect_timeout_seconds == 900
    assert str(config.alive_file) == "/tmp/alive"
    assert 0 < config.termination_seconds < pod.spec["terminationGracePeriodSeconds"] - 10
    program, script, *arguments = pod.command
    assert program == "python"
    source = (ROOT / script).read_text()
    assert [each for each in arguments if each.startswith("--") and f'"{each}"' not in source] == []


@pytest.mark.parametrize("pod", each_pod("coordinator", "shard", "standby"))
def test_probes_ask_the_port_that_the_server_listens_on(pod, monkeypatch):
    options = parsed(pod, monkeypatch)
    asked = {"grpc": {"port": options["port"]}}
    if options["tls_ca"]:
        # A kubelet's own gRPC probe speaks no TLS.
        asked = {"exec": {"command": ["python", "-m", "ps_server.health", f"localhost:{options['port']}"]}}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = pod.container[name]
        assert asked.items() <= probe.items()
        assert len({"grpc", "exec", "httpGet", "tcpSocket"} & probe.keys()) == 1
        # The program gives up after 3 s.
        assert probe["timeoutSeconds"] == 5
    # A server that is starting, or whose node is busy, is not ended for it.
    assert pod.container["startupProbe"]["failureThreshold"] * pod.container["startupProbe"]["periodSeconds"] >= 300
    assert pod.container["livenessProbe"]["failureThreshold"] * pod.container["livenessProbe"]["periodSeconds"] >= 60


@pytest.mark.parametrize("pod", each_pod("worker"))
def test_a_worker_is_killed_only_where_its_file_has_grown_old(pod, tmp_path):
    probe = pod.container["livenessProbe"]
    file = tmp_path / "alive"
    environment = {"PATH": os.environ["PATH"], "PS_ALIVE_FILE": str(file)}

    def succeeds() -> bool:
        return subprocess.run(probe["exec"]["command"], env=environment, check=False).returncode == 0

    # Before it has joined, and after it has left.
    assert succeeds()
    file.touch()
    assert succeeds()
    now = time.time()
    os.utime(file, (now - 60, now - 60))
    assert succeeds()
    os.utime(file, (now - 130, now - 130))
    assert not succeeds()
    # Touched so often that only one that stands still is that late.
    assert 130 / TOUCH_SECONDS > 20
    # One that stands still takes no SIGTERM.
    assert probe["terminationGracePeriodSeconds"] == 5
    # Its pod is new each time: a file of the process before it would kill it.
    assert pod.spec["restartPolicy"] == "Never"
    assert {"name": "tmp", "emptyDir": {}} in pod.spec["volumes"]
