"""The pods of an overlay as processes of this machine: their commands, variables, volumes and probes, nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

from ps_protocol.launch.ports import free_port
from ps_server import health
from tests.deploy.manifests import JOB_SETS, ROOT, Pod, expanded, pods
from tests.recovery.zygote import COORDINATOR, PYTHON, SHARD, Forked, shared

PATIENCE_SECONDS = 60.0

_KINDS = {"ps-coordinator": COORDINATOR, "ps-server": SHARD, "python": PYTHON}


class LocalPods:
    """Each pod's ports are free ones of this machine, its names are localhost, its volumes are folders that stay."""

    def __init__(self, name: str, folder: Path, secrets: Path | None = None) -> None:
        """``secrets``: a folder for each Secret, as ``written_secrets`` makes."""
        self.pods: Mapping[str, Pod] = {pod.name: pod for pod in pods(name)}
        self._folder = folder
        #: The claims of a JobSet are of all its pods.
        self._shares = name in JOB_SETS
        self._secrets = secrets
        self.ports = {
            pod.name: {each["containerPort"]: free_port() for each in pod.container.get("ports", ())}
            for pod in self.pods.values()
        }
        #: By host:port, as others say it, the address here.
        self._addresses = {
            f"{host}:{port}": f"localhost:{here}"
            for pod in self.pods.values()
            for port, here in self.ports[pod.name].items()
            for host in pod.hosts
        }
        self.running: dict[str, Forked] = {}
        self._exits = ExitStack()

    def __enter__(self) -> LocalPods:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.send(signal.SIGKILL)
            process.wait()
        self._exits.close()

    def of(self, *components: str) -> list[str]:
        return [pod.name for pod in self.pods.values() if pod.component in components]

    def start(self, name: str, *added: str) -> None:
        """The pod's container, as its controller starts it; ``added`` to its arguments."""
        program, *arguments = self.here(name, self.pods[name].command)
        if program == "sh":
            # What the shell does with the exit code has a test of its own.
            _, _, program, *arguments = arguments
        if program == "python":
            arguments[0] = str(ROOT / arguments[0])
        out = self._exits.enter_context(self.log(name).open("ab"))
        # Nothing is read from it.
        files = (out.fileno(), out.fileno(), out.fileno())
        environment = self.environment(name)
        self.running[name] = shared().start(_KINDS[program], [*arguments, *added], environment, files)

    def environment(self, name: str) -> dict[str, str]:
        environment = self.pods[name].environment
        # What tests compile is shared.
        environment.pop("NUMBA_CACHE_DIR", None)
        values = self.here(name, list(environment.values()))
        return dict(zip(environment, values, strict=True))

    def here(self, name: str, values: Sequence[str]) -> list[str]:
        """Addresses, ports and paths as they are on this machine."""
        ports = {str(port): str(here) for port, here in self.ports[name].items()}
        loopback = {f"localhost:{port}": f"localhost:{here}" for port, here in ports.items()}
        made = []
        for value in values:
            value = {**ports, **loopback, **self._addresses}.get(value, value)
            for mount in self.pods[name].container["volumeMounts"]:
                path = mount["mountPath"]
                if value == path or value.startswith(f"{path}/"):
                    place = self._volume(name, mount["name"])
                    if part := mount.get("subPathExpr"):
                        place /= expanded(part, self.pods[name].environment)
                    value = f"{place}{value.removeprefix(path)}"
                    break
            made.append(value)
        return made

    def _volume(self, name: str, volume: str) -> Path:
        pod = self.pods[name]
        for each in pod.spec.get("volumes", ()):
            if each["name"] == volume and "secret" in each:
                assert self._secrets is not None
                return self._secrets / each["secret"]["secretName"]
            if each["name"] == volume and "persistentVolumeClaim" in each:
                name = "shared"
        if self._shares and volume in pod.claims:
            name = "shared"
        path = self._folder / name / volume
        path.mkdir(parents=True, exist_ok=True)
        return path

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def is_ready(self, name: str) -> bool:
        """What the pod's readiness probe says: the same question, without an interpreter for each."""
        probe = self.pods[name].container["readinessProbe"]
        if "grpc" in probe:
            return self._serves(f"127.0.0.1:{self.ports[name][probe['grpc']['port']]}", {})
        program, module, asked, address = self.here(name, probe["exec"]["command"])
        assert (program, module, asked) == ("python", "-m", "ps_server.health")
        return self._serves(address, self.environment(name))

    def _serves(self, address: str, environment: Mapping[str, str]) -> bool:
        with patch.dict(os.environ, environment):
            try:
                health.check(address)
            except health.NotServing:
                return False
            return True

    def probe_succeeds(self, name: str) -> bool:
        """The command of the readiness probe, run as a kubelet does."""
        _, *arguments = self.here(name, self.pods[name].container["readinessProbe"]["exec"]["command"])
        environment = {**os.environ, **self.environment(name)}
        return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True).returncode == 0

    def wait_ready(self, *names: str) -> None:
        """Raises AssertionError with the log of one that is not."""
        end = time.monotonic() + PATIENCE_SECONDS
        for name in names:
            while not self.is_ready(name):
                assert time.monotonic() < end, f"{name} is not ready: {self.log(name).read_text()}"
                assert self.running[name].poll() is None, f"{name} ended: {self.log(name).read_text()}"
                time.sleep(0.05)

    def end(self, *names: str) -> dict[str, int]:
        """SIGTERM to all at once; their exit codes, each within the pod's grace period."""
        for name in names:
            self.running[name].send(signal.SIGTERM)
        return {name: self.running[name].wait(self.pods[name].spec["terminationGracePeriodSeconds"]) for name in names}
