"""An sshd of this user on loopback with keys of its own, and the hosts h0, h1, … that ssh reaches through it."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
from pathlib import Path

from ps_protocol.launch.ports import free_port
from tests.cli.launcher.jobs import wait_until

PRIVILEGE_FOLDER = Path("/run/sshd")
"""Started by root, sshd needs it; Debian's service makes it."""


def no_sshd() -> str:
    """Why no sshd can be started here; empty where one can."""
    if _sshd() is None:
        return "sshd is not installed (Debian: openssh-server)"
    if shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        return "ssh is not installed (Debian: openssh-client)"
    return ""


def _sshd() -> str | None:
    return shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")


class Sshd:
    """Hosts h0 to h3 are 127.0.0.1 to 127.0.0.4. ``command`` is what --ssh is given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        for name in ("host", "user", "other"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True, timeout=60
            )
        shutil.copy(folder / "user.pub", folder / "authorized")
        self._write("sshd_config", self._server_lines())
        self._write("known_hosts", [f"* {(folder / 'host.pub').read_text()}"])
        self._write("ssh_config", self._client_lines())
        self.command = f"ssh -F {folder / 'ssh_config'}"
        if os.getuid() == 0:
            PRIVILEGE_FOLDER.mkdir(mode=0o755, exist_ok=True)
        with (folder / "log").open("w") as log:
            command = [str(_sshd()), "-D", "-e", "-f", str(folder / "sshd_config")]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
        wait_until(self._answers, "sshd listens")

    def _server_lines(self) -> list[str]:
        folder = self.folder
        return [
            *(f"ListenAddress 127.0.0.{number}:{self.port}" for number in range(1, 5)),
            f"HostKey {folder / 'host'}",
            f"AuthorizedKeysFile {folder / 'authorized'}",
            f"PidFile {folder / 'pid'}",
            "StrictModes no",
            "PermitRootLogin yes",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "UsePAM no",
            "PermitUserEnvironment no",
            "MaxStartups 100",
        ]

    def _client_lines(self) -> list[str]:
        folder = self.folder
        lines = [
            line
            for number in range(4)
            for line in (f"Host h{number}", f"  HostName 127.0.0.{number + 1}", f"  Port {self.port}")
        ]
        return [
            *lines,
            "Host closed",
            "  HostName 127.0.0.1",
            f"  Port {free_port()}",
            "Host stranger",
            "  HostName 127.0.0.1",
            f"  Port {self.port}",
            f"  UserKnownHostsFile {folder / 'nobody'}",
            "Host keyless",
            "  HostName 127.0.0.1",
            f"  Port {self.port}",
            f"  IdentityFile {folder / 'other'}",
            "Host h* closed stranger",
            f"  IdentityFile {folder / 'user'}",
            "Host *",
            f"  User {getpass.getuser()}",
            "  IdentitiesOnly yes",
            "  IdentityAgent none",
            f"  UserKnownHostsFile {folder / 'known_hosts'}",
            "  GlobalKnownHostsFile /dev/null",
            "  StrictHostKeyChecking yes",
            "  LogLevel ERROR",
        ]

    def _write(self, name: str, lines: list[str]) -> None:
        (self.folder / name).write_text("\n".join(lines) + "\n")

    def _answers(self) -> bool:
        assert self._process.poll() is None, (self.folder / "log").read_text()
        try:
            socket.create_connection(("127.0.0.4", self.port), 5).close()
        except OSError:
            return False
        return True

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
