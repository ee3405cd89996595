"""A Slurm in a folder: munged, slurmctld and a slurmd for each node, all on this machine, started by root."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ps_protocol.launch.ports import free_port
from tests.cli.launcher.jobs import wait_until

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel")


def no_slurm() -> str:
    """Why no Slurm can be started here; empty where one can."""
    missing = [name for name in _PROGRAMS if _path(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: slurmctld slurmd slurm-client munge)"
    return "" if os.getuid() == 0 else "slurmd is started by root"


def _path(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin")


class Slurm:
    """``environment`` is what its commands need. ``nodes``: names that are reached on this machine."""

    def __init__(self, folder: Path, nodes: Sequence[str] = ("localhost",)) -> None:
        self.folder = folder
        self._nodes = nodes
        # munged wants that nobody else can write to any folder above its socket.
        folder.chmod(0o755)
        (folder / "state").mkdir()
        # slurmd makes sockets in it, whose names may have 108 characters with the path.
        self._spool = tempfile.TemporaryDirectory(prefix="slurm")
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        (folder / "slurm.conf").write_text("\n".join(self._configuration()) + "\n")
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        places = ("key-file=munge.key", "socket=munge.sock", "pid-file=munged.pid", "log-file=munged.log")
        options = [f"--{option}={folder / name}" for option, _, name in (place.partition("=") for place in places)]
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._start("munged", "--foreground", "--force", f"--seed-file={folder / 'seed'}", *options)
        wait_until((folder / "munge.sock").exists, "munged listens")
        self._start("slurmctld", "-D", "-c")
        for node in nodes:
            self._start("slurmd", "-D", "-N", node)
        wait_until(
            lambda: self.call("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * len(nodes), "nodes are idle"
        )

    def _configuration(self) -> list[str]:
        folder = self.folder
        return [
            "ClusterName=tests",
            "SlurmctldHost=localhost",
            f"SlurmctldPort={free_port()}",
            "AuthType=auth/munge",
            f"AuthInfo=socket={folder / 'munge.sock'}",
            "SlurmUser=root",
            f"StateSaveLocation={folder / 'state'}",
            f"SlurmdSpoolDir={self._spool.name}/%n",
            f"SlurmctldPidFile={folder / 'slurmctld.pid'}",
            f"SlurmdPidFile={folder}/slurmd-%n.pid",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SwitchType=switch/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none",
            "MpiDefault=none",
            "ReturnToService=2",
            "SlurmdParameters=config_overrides",
            *(
                f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr={socket.gethostbyname(node)}"
                f" Port={free_port()} CPUs=8 State=UNKNOWN"
                for node in self._nodes
            ),
            "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
        ]

    def _start(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}-{len(self._daemons)}.out").open("w") as out:
            command = [str(_path(name)), *arguments]
            self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=out, stderr=out))

    def call(self, *command: str, **environment: str) -> str:
        """The output of a command of Slurm, empty where it fails."""
        done = subprocess.run(
            command, env={**self.environment, **environment}, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    def close(self) -> None:
        """End what runs, then the daemons."""
        self.call("scancel", "--user=root", "--signal=KILL", "--full")
        self.call("scancel", "--user=root")
        wait_until(lambda: not self.call("squeue", "-h"), "no job is left")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait()
        self._spool.cleanup()
