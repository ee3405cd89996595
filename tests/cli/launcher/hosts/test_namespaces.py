"""ps-run --hosts between network namespaces, which have addresses of their own: a training under TLS (full length)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launcher.hosts.sshd import PRIVILEGE_FOLDER, no_sshd
from tests.cli.launcher.jobs import wait_until

NET = "10.79.41"

TRAIN = """
import torch, ps_worker
with ps_worker.connect() as cluster:
    model = torch.nn.Linear(2, 1)
    optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 2)).square().mean().backward()
        optimizer.step()
    print("trained")
"""


def no_namespaces() -> str:
    """Why no namespaces can be made here; empty where they can."""
    if no_sshd():
        return no_sshd()
    if os.getuid() or shutil.which("ip") is None:
        return "network namespaces need root and ip (Debian: iproute2)"
    name = f"tps{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, timeout=60, check=False)
    if made.returncode:
        return f"ip netns add fails: {made.stderr.decode()[:80]}"
    ip("netns", "del", name)
    return ""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=60)


@pytest.fixture
def network(tmp_path):
    """Hosts 1 and 2 with an sshd each, and 3 without, on one bridge; the command of ssh for them."""
    names = {number: f"tps{os.getpid()}h{number}" for number in (0, 1, 2, 3)}
    processes: list[subprocess.Popen[bytes]] = []
    PRIVILEGE_FOLDER.mkdir(mode=0o755, exist_ok=True)
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True, timeout=60
        )
    try:
        for name in names.values():
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "br0", "type", "bridge")
        ip("-n", names[0], "link", "set", "br0", "up")
        for number in (1, 2, 3):
            peer = ("type", "veth", "peer", "name", "eth0", "netns", names[number])
            ip("link", "add", f"p{number}", "netns", names[0], *peer)
            ip("-n", names[0], "link", "set", f"p{number}", "master", "br0", "up")
            ip("-n", names[number], "addr", "add", f"{NET}.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", names[number], "link", "set", device, "up")
        for number in (1, 2):
            processes.append(start_sshd(tmp_path, names[number], number))
        (tmp_path / "known").write_text(f"* {(tmp_path / 'host.pub').read_text()}")
        ssh = f"ssh -F none -i {tmp_path / 'user'} -o IdentityAgent=none -o UserKnownHostsFile={tmp_path / 'known'}"
        yield names[3], f"{ssh} -o LogLevel=ERROR"
    finally:
        for process in processes:
            process.terminate()
            process.wait()
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=60)


def start_sshd(folder: Path, namespace: str, number: int) -> subprocess.Popen[bytes]:
    config = folder / f"sshd{number}"
    lines = [
        f"ListenAddress {NET}.{number}:22",
        f"HostKey {folder / 'host'}",
        f"AuthorizedKeysFile {folder / 'user.pub'}",
        f"PidFile {folder / 'pid'}{number}",
        "StrictModes no",
        "PermitRootLogin yes",
        "UsePAM no",
    ]
    config.write_text("\n".join(lines) + "\n")
    program = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
    log = folder / f"log{number}"
    with log.open("w") as file:
        command = ["ip", "netns", "exec", namespace, str(program), "-D", "-e", "-f", str(config)]
        process = subprocess.Popen(command, stderr=file)
    wait_until(lambda: "listening" in log.read_text(), "sshd listens")
    return process


@pytest.mark.long
@pytest.mark.skipif(bool(no_namespaces()), reason=no_namespaces() or "namespaces are here")
def test_hosts_with_addresses_of_their_own_need_tls_and_train(tmp_path, network):
    namespace, ssh = network
    (tmp_path / "train.py").write_text(TRAIN)
    hosts = f"{NET}.1,{NET}.2"
    command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "ps_server.cli.launcher.main"]
    command += ["--hosts", hosts, "--ssh", ssh, "--shards", "2", "--no-progress"]
    plain, secured = (
        subprocess.run(
            [*command, *flags, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        for flags in ([], ["--tls"])
    )
    assert plain.returncode == 2
    assert f"would listen on {NET}.1 without TLS and tokens" in plain.stderr
    assert secured.returncode == 0, secured.stderr
    assert f"coordinator at {NET}.1:" in secured.stderr
    assert [f"worker {rank}    | trained" in secured.stdout for rank in (0, 1)] == [True, True]
