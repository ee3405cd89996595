"""Jobs without servers: the processes of a script under a data-parallel strategy, with the variables of torchrun."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from re import fullmatch
from typing import Any, Self

import click
from click.core import ParameterSource

from ps_protocol.cluster.replicas import REPLICATED, SERVED, STORE_VARIABLE, STRATEGIES_GROUP, STRATEGY_VARIABLE
from ps_protocol.launch.ports import free_port
from ps_protocol.model.spec import Mode
from ps_server.cli.launcher.events import ProcessName
from ps_server.cli.launcher.programs import Programs

#: Flags that jobs without servers have, too.
_COMMON_FLAGS = frozenset(
    {"strategy", "workers", "log_dir", "log_format", "no_progress", "python", "module", "script", "arguments", "config"}
)


def given_values(context: click.Context) -> dict[str, Any]:
    """The flags that were set, and their values: on the command line; of some also in the environment or a file.

    Settings of servers that are not on the command line are for whichever job has servers.
    """
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {
        name: value
        for name, value in context.params.items()
        if sources[name] is ParameterSource.COMMANDLINE
        or (name in _COMMON_FLAGS and sources[name] is not ParameterSource.DEFAULT)
    }


def check_strategy(name: str | None, given: Mapping[str, object]) -> None:
    """Raises click.UsageError for a name that is not known, and for a flag that does not apply to it.

    ``given``: the flags that the user gave, and their values.
    """
    if name is None:
        return
    others = sorted(entry.name for entry in entry_points(group=STRATEGIES_GROUP))
    if name not in (*SERVED, *REPLICATED, *others):
        raise click.UsageError(f"unknown strategy '{name}': choose from {', '.join((*SERVED, *REPLICATED, *others))}")
    if name == "central_storage" and given.get("mode", Mode.SYNC.value) != Mode.SYNC.value:
        raise click.UsageError(f"--mode {given['mode']}: central_storage trains in step, with --mode sync")
    if name == "one_device" and str(given.get("workers", 1)) != "1":
        raise click.UsageError(f"--workers {given['workers']}: one_device is one process")
    if name not in SERVED:
        _refuse_server_flags(name, given)


def _refuse_server_flags(name: str, given: Iterable[str]) -> None:
    unused = [flag for flag in given if flag not in _COMMON_FLAGS]
    if unused:
        flags = ", ".join(f"--{flag.replace('_', '-')}" for flag in unused)
        raise click.UsageError(f"{flags}: strategy {name} has no coordinator and no shards")


def has_servers(name: str | None) -> bool:
    """Whether a job with this strategy has a coordinator and shards."""
    return name is None or name in SERVED


def gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """The number of GPUs of this host that processes see, without loading torch."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        return len([each for each in environ["CUDA_VISIBLE_DEVICES"].split(",") if each.strip() not in ("", "-1")])
    return sum(bool(fullmatch(r"nvidia\d+", each.name)) for each in devices.iterdir())


@dataclass(frozen=True, slots=True)
class ReplicaPrograms(Programs):
    """The processes of a script that are all there is of the job: they find each other in a file of this host."""

    store: Path = Path()

    @classmethod
    def of(cls, programs: Programs, store: Path) -> Self:
        """``programs`` without servers; replicas meet in the file ``store``, which does not exist yet."""
        return cls(
            programs.script,
            programs.consistency,
            shards=0,
            workers=programs.workers,
            cores=programs.cores,
            log_format=programs.log_format,
            # For scripts that open a process group by themselves.
            port=free_port(),
            strategy=programs.strategy,
            store=store,
        )

    def summary(self, *, goes_on: bool) -> str:
        """A short description of the job."""
        return f"{self.workers} replica(s), strategy {self.strategy}"

    def environment(self, process: ProcessName, coordinator: str, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment of a replica; with a TF_CONFIG this host's process is one of several hosts'."""
        environment = {**inherited, "PYTHONUNBUFFERED": "1", STRATEGY_VARIABLE: self.strategy}
        environment.setdefault("OMP_NUM_THREADS", str(max(1, self.cores // self.workers)))
        if self.strategy == "one_device" or (self.workers == 1 and environment.get("TF_CONFIG")):
            return environment
        # Before torch chooses an interface by the host's name, which need not be one of this host's addresses.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment.pop("TF_CONFIG", None)
        rank, replicas = str(process.index), str(self.workers)
        return environment | {
            "RANK": rank,
            "WORLD_SIZE": replicas,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": replicas,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            STORE_VARIABLE: str(self.store),
        }
