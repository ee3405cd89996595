"""An overlay's pods as containers of an engine, from its manifests: user, read-only root, volumes, names, probes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.deploy.manifests import ROOT, SOURCES, Pod, expanded, pods, written_secrets
from tests.deploy.test_up import no_engine

#: Another run of these tests on the same engine has its own.
PROJECT = f"torch-ps-k8s-test-{os.getpid()}"
WAIT_SECONDS = 600.0

# The image may have to be built first.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(3 * WAIT_SECONDS)]

#: A few epochs do not reach what the script expects by itself.
TRAINING = ("--epochs", "4", "--expect-accuracy", "0.8")


def docker(*arguments: str | Path, check: bool = True) -> str:
    done = subprocess.run(["docker", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"docker {arguments}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def of_the_group(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """A file of a Secret as a kubelet mounts it: of root, for the group to read."""
    member.uid, member.gid = 0, 1000
    # Where there are names, tar takes them before numbers.
    member.uname = member.gname = ""
    member.mode = 0o440 if member.isfile() else 0o755
    return member


class Engine:
    """One network, a volume for each claim, a container for each pod."""

    def __init__(self, name: str, secrets: Path) -> None:
        self.pods = {pod.name: pod for pod in pods(name)}
        self._secrets = secrets
        # No way out, as in compose.yaml.
        docker("network", "create", "--internal", PROJECT)

    def create(self, pod: Pod, *added: str) -> str:
        """The container as a kubelet makes it; started by ``start``."""
        security = pod.container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        user = f"{pod.spec['securityContext']['runAsUser']}:{pod.spec['securityContext']['runAsGroup']}"
        entry, *arguments = pod.command
        options: list[str] = [
            *("--name", f"{PROJECT}-{pod.name}", "--hostname", pod.name, "--network", PROJECT, "--init"),
            *("--user", user, "--read-only", "--security-opt", "no-new-privileges:true", "--entrypoint", entry),
            *(f"--cap-drop={each}" for each in security["capabilities"]["drop"]),
            *(f"--network-alias={host}" for host in pod.hosts),
            *(f"--env={name}={value}" for name, value in pod.environment.items()),
        ]
        for mount in pod.container["volumeMounts"]:
            if "subPathExpr" not in mount:
                options += self._mounted(pod, mount)
        options += self._parts(pod)
        docker("create", *options, pod.container["image"], *arguments, *added)
        return f"{PROJECT}-{pod.name}"

    def _secret(self, pod: Pod, volume: str) -> Path | None:
        found = [each for each in pod.spec.get("volumes", ()) if each["name"] == volume and "secret" in each]
        return self._secrets / found[0]["secret"]["secretName"] if found else None

    def _mounted(self, pod: Pod, mount: dict[str, str]) -> list[str]:
        name, path = mount["name"], mount["mountPath"]
        if name in pod.claims or self._secret(pod, name):
            volume = f"{PROJECT}-{pod.name}-{name}"
        elif any(each["name"] == name and "persistentVolumeClaim" in each for each in pod.spec["volumes"]):
            volume = f"{PROJECT}-{name}"
        else:
            # Of the pod's user: the engine gives it the mode of the image's folder, where there is one.
            owner = f"uid={pod.spec['securityContext']['runAsUser']},gid={pod.spec['securityContext']['runAsGroup']}"
            return [f"--tmpfs={path}:exec,{owner}"]
        secret = self._secret(pod, name)
        self._fill(volume, {".": secret} if secret else {})
        return [f"--volume={volume}:{path}"]

    def _parts(self, pod: Pod) -> list[str]:
        """Files of Secrets that are mounted one by one: those of one folder in one volume."""
        folders: dict[str, dict[str, Path]] = {}
        for mount in pod.container["volumeMounts"]:
            if part := mount.get("subPathExpr"):
                secret = self._secret(pod, mount["name"])
                assert secret
                folder, _, name = mount["mountPath"].rpartition("/")
                folders.setdefault(folder, {})[name] = (secret / expanded(part, pod.environment)).resolve()
        options = []
        for folder, files in folders.items():
            volume = f"{PROJECT}-{pod.name}-{folder.strip('/')}"
            self._fill(volume, files)
            options.append(f"--volume={volume}:{folder}")
        return options

    def _fill(self, volume: str, files: Mapping[str, Path]) -> None:
        """Give the volume to the group of the pods, as ``fsGroup`` does, with ``files`` under these names."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for name, path in files.items():
                archive.add(path, name, filter=of_the_group)
        command = ["docker", "run", "--rm", "--interactive", "--user", "0", "--entrypoint", "sh"]
        script = "tar --extract --directory /v && chgrp 1000 /v && chmod 2770 /v"
        command += [f"--volume={volume}:/v", "torch-ps", "-c", script]
        done = subprocess.run(command, input=packed.getvalue(), capture_output=True, check=False)
        assert done.returncode == 0, done.stderr

    def start(self, name: str, *added: str) -> None:
        """``added`` to its arguments."""
        docker("start", self.create(self.pods[name], *added))

    def replace(self, name: str) -> None:
        """Kill a pod; as its StatefulSet does, a new one has the volume of the old one, and another address."""
        lost = self.address(name)
        docker("rm", "--force", f"{PROJECT}-{name}")
        # Holds the address that the new one would have.
        holds = ("--name", f"{PROJECT}-holds", "--network", PROJECT, "--entrypoint", "sleep")
        docker("run", "--detach", *holds, "torch-ps", "3600")
        self.start(name)
        assert self.address(name) != lost

    def address(self, name: str) -> str:
        wanted = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return docker("inspect", "--format", wanted, f"{PROJECT}-{name}")

    def is_ready(self, name: str) -> bool:
        probe = self.pods[name].container["readinessProbe"]
        command = (
            probe["exec"]["command"]
            if "exec" in probe
            else ["python", "-m", "ps_server.health", f"localhost:{probe['grpc']['port']}"]
        )
        return (
            subprocess.run(
                ["docker", "exec", f"{PROJECT}-{name}", *command], capture_output=True, check=False
            ).returncode
            == 0
        )

    def wait_ready(self, *names: str) -> None:
        end = time.monotonic() + WAIT_SECONDS
        for name in names:
            while not self.is_ready(name):
                assert time.monotonic() < end, self.logs(name)
                time.sleep(0.5)

    def logs(self, name: str) -> str:
        done = subprocess.run(["docker", "logs", f"{PROJECT}-{name}"], capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def steps(self, coordinator: str) -> int:
        """Steps of all workers."""
        status = docker("exec", f"{PROJECT}-{coordinator}", "psctl", "status", "-o", "json", check=False)
        try:
            members = json.loads(status)["members"]
        except (ValueError, KeyError):
            return 0
        return sum(each["stats"]["steps"] for each in members if each["member"]["role"] == "worker")

    def of(self, *components: str) -> list[str]:
        return [pod.name for pod in self.pods.values() if pod.component in components]


def clean() -> None:
    """What is left of this project, and nothing else."""
    for kind, remove in (("ps --all", "rm --force"), ("volume ls", "volume rm"), ("network ls", "network rm")):
        for each in docker(*kind.split(), "--quiet", "--filter", f"name={PROJECT}", check=False).split():
            docker(*remove.split(), each, check=False)


@pytest.fixture
def image() -> Iterator[None]:
    if reason := no_engine():
        pytest.skip(f"needs a Docker engine: {reason}")
    if not docker("images", "--quiet", "torch-ps"):
        docker("build", "--network", "host", "--file", ROOT / "deploy" / "Dockerfile", "--tag", "torch-ps", ROOT)
    clean()
    yield
    clean()


@pytest.mark.parametrize("name", ["base", "durable"])
def test_the_pods_train_in_containers_lose_a_shard_and_go_on(name, image, tmp_path):
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    made = subprocess.run(
        [SOURCES / "secrets.sh", tmp_path / "certs", "2"], env=environment, capture_output=True, text=True, check=True
    )
    written_secrets(made.stdout, tmp_path / "mounted")
    engine = Engine(name, tmp_path / "mounted")
    (coordinator,) = engine.of("coordinator")
    servers = [coordinator, *engine.of("shard"), *engine.of("standby")]
    for pod in servers:
        engine.start(pod)
    for pod in engine.of("worker"):
        engine.start(pod, *TRAINING)
    engine.wait_ready(*servers)
    end = time.monotonic() + WAIT_SECONDS
    while engine.steps(coordinator) < 20:
        assert time.monotonic() < end, engine.logs(engine.of("worker")[0])
        time.sleep(0.2)
    lost = engine.of("shard")[0]
    engine.replace(lost)
    codes = {pod: docker("wait", f"{PROJECT}-{pod}") for pod in engine.of("worker")}
    assert set(codes.values()) == {"0"}, "\n".join(map(engine.logs, codes))
    for pod in servers:
        grace = engine.pods[pod].spec["terminationGracePeriodSeconds"]
        docker("stop", "--time", str(grace), f"{PROJECT}-{pod}")
        assert docker("wait", f"{PROJECT}-{pod}") == "0", engine.logs(pod)
