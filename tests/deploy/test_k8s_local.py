"""Overlays as processes, from their manifests: they train, lose a shard and go on. About 12 s of CPU an overlay."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cryptography import x509

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import Role
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.settings import SecuritySettings
from tests.deploy.local_pods import PATIENCE_SECONDS, LocalPods
from tests.deploy.manifests import SECURED, SOURCES, Document, expanded, found, pods, written_secrets
from tests.support.length import choose
from tests.support.shards import wait_until

EPOCHS, ACCURACY = choose((10, 0.97), (3, 0.8))

#: A job without TLS and one with everything; the others differ in labels and numbers.
RUN = choose(["base", "dev", "tls", "durable", "kubeflow", "jobset-tls"], ["durable"])


@pytest.fixture(scope="module")
def secrets(tmp_path_factory) -> Path:
    """What a cluster has after secrets.sh, twice: the second time it renews the certificates."""
    folder = tmp_path_factory.mktemp("secrets")
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for _ in range(2):
        command = [SOURCES / "secrets.sh", folder / "certs", "2", "torch-ps"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    written_secrets(done.stdout, folder / "mounted")
    return folder / "mounted"


def test_secrets_are_made_for_each_role_alone(secrets):
    made = {each.name: {file.name for file in each.iterdir()} for each in secrets.iterdir()}
    for files in made.values():
        files -= {"..data", "..2026_11_22"}
    pair = {f"shard-{n}.{kind}" for n in (0, 1) for kind in ("pem", "key")}
    assert made == {
        "torch-ps-coordinator": {"ca.pem", "coordinator.pem", "coordinator.key", "tokens"},
        "torch-ps-shards": {"ca.pem", "tokens"},
        "torch-ps-shard-keys": pair,
        "torch-ps-worker": {"ca.pem", "worker.pem", "worker.key", "worker.token"},
        "torch-ps-viewer": {"ca.pem", "viewer.pem", "viewer.key", "viewer.secret"},
    }
    assert "admin" not in (secrets / "torch-ps-worker" / "worker.token").read_text()
    mounted = {
        volume["secret"]["secretName"]: volume["secret"]["defaultMode"]
        for pod in pods("tls")
        for volume in pod.spec["volumes"]
        if "secret" in volume
    }
    # The one that is left is for Prometheus.
    assert mounted == dict.fromkeys(made.keys() - {"torch-ps-viewer"}, 0o440)


@pytest.mark.parametrize("name", SECURED)
def test_a_pod_can_read_its_own_key_and_no_other(name, secrets):
    for pod in pods(name):
        sources = {each["name"]: each["secret"]["secretName"] for each in pod.spec["volumes"] if "secret" in each}
        seen = set()
        for mount in pod.container["volumeMounts"]:
            if mount["name"] in sources:
                part = expanded(mount.get("subPathExpr", ""), pod.environment)
                place = secrets / sources[mount["name"]] / part
                assert place.exists()
                seen |= {place.name} if part else {each.name for each in place.iterdir()}
        number = pod.environment.get("PS_SERVER_SHARD")
        owner = {"coordinator": "coordinator", "worker": "worker"}.get(pod.component, f"shard-{number}")
        assert {each for each in seen if each.endswith(".key")} == {f"{owner}.key"}


@pytest.mark.parametrize("name", ["tls", "durable", "jobset-tls"])
def test_the_certificate_of_a_server_has_the_names_under_which_it_is_reached(name, secrets):
    for pod in pods(name):
        if pod.component != "worker":
            number = pod.environment.get("PS_SERVER_SHARD")
            owner = "coordinator" if number is None else f"shard-{number}"
            (file,) = secrets.glob(f"torch-ps-*/{owner}.pem")
            names = x509.load_pem_x509_certificate(file.read_bytes()).extensions.get_extension_for_class(
                x509.SubjectAlternativeName
            )
            assert set(pod.hosts) <= set(names.value.get_values_for_type(x509.DNSName))


def test_secrets_need_a_folder_and_a_number():
    done = subprocess.run([SOURCES / "secrets.sh"], capture_output=True, text=True, check=False)
    assert (done.returncode, "usage:" in done.stderr) == (2, True)


def metrics_status(cluster: LocalPods, name: str, endpoint: Document, secrets: Path) -> int:
    """The HTTP status that Prometheus gets with what a PodMonitor says, from another machine."""

    def secret(reference: Document) -> Path:
        return secrets / reference["name"] / reference["key"]

    tls = endpoint["tlsConfig"]
    context = ssl.create_default_context(cafile=str(secret(tls["ca"]["secret"])))
    context.load_cert_chain(secret(tls["cert"]["secret"]), secret(tls["keySecret"]))
    token = secret(endpoint["authorization"]["credentials"]).read_text()
    port = cluster.ports[name][7009]
    with (
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=tls["serverName"]) as line,
    ):
        line.sendall(f"GET /metrics HTTP/1.1\r\nHost: 10.1.2.3:7009\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
        return int(line.makefile("rb").readline().split()[1])


def steps_of_workers(cluster: LocalPods) -> int:
    (name,) = cluster.of("coordinator")
    environment = cluster.environment(name)
    security = Security(SecuritySettings.from_environment(environment), AccessRole.ADMIN)
    with CoordinatorClient(environment["PS_COORDINATOR"], security) as client:
        status = client.get_status()
    return sum(each.stats.steps for each in status.members if each.member.role is Role.WORKER)


@pytest.mark.parametrize("name", RUN)
def test_the_pods_train_lose_a_shard_and_go_on(name, secrets, tmp_path):
    with LocalPods(name, tmp_path, secrets) as cluster:
        servers = cluster.of("coordinator", "shard")
        for pod in servers:
            cluster.start(pod)
        cluster.wait_ready(*servers)
        for pod in (standbys := cluster.of("standby")):
            cluster.start(pod)
        workers = cluster.of("worker")
        for pod in workers:
            cluster.start(pod, "--epochs", str(EPOCHS))
        cluster.wait_ready(*standbys)
        # Once: a probe gives up after 3 s, and is repeated.
        for pod in standbys:
            wait_until(lambda pod=pod: cluster.probe_succeeds(pod))
        if name in SECURED:
            (endpoint,) = found("monitored", "PodMonitor", "torch-ps")["spec"]["podMetricsEndpoints"]
            for pod in (*servers, *standbys):
                assert metrics_status(cluster, pod, endpoint, secrets) == 200
        end = time.monotonic() + PATIENCE_SECONDS
        while steps_of_workers(cluster) < 4:
            assert time.monotonic() < end, cluster.log(workers[0]).read_text()
        lost = cluster.of("shard")[0]
        cluster.running[lost].send(signal.SIGKILL)
        assert cluster.running[lost].wait() == -signal.SIGKILL
        cluster.start(lost)
        first, *others = [cluster.running[pod].wait(2 * PATIENCE_SECONDS) for pod in workers]
        assert others == [0] * len(others), cluster.log(workers[1]).read_text()
        said = cluster.log(workers[0]).read_text()
        accuracy = float(said.partition("test accuracy ")[2].split()[0])
        assert accuracy >= ACCURACY, said
        # The script's own judgement; a few epochs do not reach what it expects.
        assert first == int(accuracy < 0.97), said
        # The model is in the claim that all workers have, where there is one.
        saved = list(tmp_path.rglob("digits.pt"))
        assert saved == (
            [tmp_path / "shared" / "models" / "digits.pt"] if "--save" in cluster.pods[workers[0]].command else []
        )
        cluster.wait_ready(lost)
        (coordinator,) = cluster.of("coordinator")
        if "PS_COORDINATOR_CHECKPOINT_DIR" in cluster.pods[coordinator].environment:
            # The last one, which needs all shards: without it the coordinator ends with another code.
            wait_until(lambda: list(tmp_path.glob("shared/checkpoints/checkpoint-*/manifest.json")))
        # Ended together, as with kubectl delete.
        assert set(cluster.end(*cluster.of("standby", "shard", "coordinator")).values()) == {0}


def test_in_a_job_set_a_server_that_is_told_to_end_does_not_look_as_if_its_work_were_done(tmp_path):
    pod = pods("jobset")[0]
    shell, flag, script, *_ = pod.command
    sh = shutil.which(shell)
    assert sh

    def code_of(program: str, send: signal.Signals | None = None) -> int:
        ready = tmp_path / "ready"
        ready.unlink(missing_ok=True)
        with subprocess.Popen([sh, flag, script, "bash", "-c", program], env={"READY": str(ready)}) as process:
            if send:
                while not ready.exists():
                    time.sleep(0.01)
                process.send_signal(send)
        return process.returncode

    waits = 'trap "exit %d" TERM; : > "$READY"; while :; do sleep 0.05; done'
    assert code_of(waits % 0, signal.SIGTERM) == 143
    assert code_of(waits % 3, signal.SIGTERM) == 3
    assert code_of("exit 0") == 143
    assert code_of("exit 2") == 2
