"""Which processes of the job a task of srun runs, and where the coordinator is. Pure."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ps_protocol.errors import ConfigError
from ps_protocol.text import whole_number
from ps_server.cli.launcher.events import ProcessName, ProcessRole

_MOST_NODES = 100_000

_PARTS = re.compile(r"([^,\[\]]*(?:\[[^\[\]]*\][^,\[\]]*)*)(?:,|$)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def expand(text: str) -> list[str]:
    """The node names of a list such as ``gpu[01-03,7],login``, in order. Raises ConfigError for what is no list."""
    names: list[str] = []
    position = 0
    while position < len(text):
        found = _PARTS.match(text, position)
        if found is None or not found[1]:
            raise _no_node_list(text)
        names += _node_names(found[1], text)
        if len(names) > _MOST_NODES:
            raise _no_node_list(text)
        position = found.end()
    if not names or text.endswith(","):
        raise _no_node_list(text)
    return names


def _node_names(part: str, text: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [before]
    ranges, _, after = rest.partition("]")
    tails = _node_names(after, text)
    return [f"{before}{number}{tail}" for number in _node_numbers(ranges, text) for tail in tails]


def _node_numbers(ranges: str, text: str) -> Iterator[str]:
    for each in ranges.split(","):
        found = _RANGE.fullmatch(each)
        if found is None:
            raise _no_node_list(text)
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first) or int(last) - int(first) > _MOST_NODES:
            raise _no_node_list(text)
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _no_node_list(text: str) -> ConfigError:
    return ConfigError(
        "this is no node list of Slurm",
        expected="names and ranges, such as gpu[01-03,7],login",
        actual=repr(text[:200]),
        remedy="start ps-run --slurm with srun, which sets SLURM_STEP_NODELIST",
    )


FIRST_PORT, PORTS = 20_000, 10_000
"""Where the port of a coordinator comes from, by the number of the job, where nothing else names one."""


class TaskLayout(enum.Enum):
    """How processes are laid out over tasks."""

    #: One process in each task: the coordinator, then the shards, then the workers.
    SEPARATE = "separate"
    #: A worker in each task; beside some of them the coordinator and the shards.
    TOGETHER = "together"


@dataclass(frozen=True, slots=True)
class SlurmTask:
    """One task of a step, from the variables that srun sets."""

    number: int
    tasks: int
    nodes: Sequence[str]
    #: Name of this task's node.
    node: str
    job: int
    step: int
    reserved_ports: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> SlurmTask:
        """Raises ConfigError where srun has not set what is needed."""
        number, tasks = _number("SLURM_PROCID", environ), _number("SLURM_STEP_NUM_TASKS", environ)
        if number >= tasks:
            raise ConfigError(
                "SLURM_PROCID is not below SLURM_STEP_NUM_TASKS", expected=f"0 to {tasks - 1}", actual=str(number)
            )
        nodes = expand(_text("SLURM_STEP_NODELIST", environ))
        return cls(
            number,
            tasks,
            nodes,
            environ.get("SLURMD_NODENAME") or nodes[0],
            _number("SLURM_JOB_ID", environ),
            _number("SLURM_STEP_ID", environ),
            environ.get("SLURM_STEP_RESV_PORTS", ""),
        )

    @property
    def coordinator_node(self) -> str:
        """The node of task 0: srun puts it on the first node."""
        return self.nodes[0]

    @property
    def shares_nodes(self) -> bool:
        """Whether there are several nodes, and more tasks than nodes."""
        return self.tasks > len(set(self.nodes)) > 1

    def port(self, asked: int) -> int:
        """Of the coordinator: ``asked``, else the first that Slurm reserved (srun --resv-ports), else by the job."""
        if asked:
            return asked
        if self.reserved_ports:
            return int(expand(f"[{self.reserved_ports}]")[0])
        return FIRST_PORT + (self.job * 16 + self.step) % PORTS


def workers_of(layout: TaskLayout, tasks: int, shards: int, asked: int | None) -> int:
    """The number of workers of the job. Raises ConfigError when the tasks do not fit."""
    workers = tasks if layout is TaskLayout.TOGETHER else tasks - 1 - shards
    if workers < 1 or (asked is not None and asked != workers):
        takes = (
            "a worker in each task"
            if layout is TaskLayout.TOGETHER
            else f"1 task for the coordinator, {shards} for shards"
        )
        raise ConfigError(
            f"{tasks} tasks do not fit the job",
            expected=f"layout {layout.value}: {takes}" + (f", {asked} workers" if asked is not None else ", workers"),
            actual=f"{tasks} tasks",
            remedy="correct --ntasks of sbatch or srun, --shards or --layout, and leave --workers out",
        )
    return workers


def processes_of(layout: TaskLayout, number: int, tasks: int, shards: int) -> list[ProcessName]:
    """The processes of task ``number``, in the order in which they are started."""
    coordinator = [ProcessName(ProcessRole.COORDINATOR)] if number == 0 else []
    if layout is TaskLayout.TOGETHER:
        # Dealt over the tasks at equal distances, and so over the nodes.
        own = [shard for shard in range(shards) if shard * tasks // max(shards, 1) % tasks == number]
        beside = [ProcessName(ProcessRole.SHARD, shard) for shard in own]
        return [*coordinator, *beside, ProcessName(ProcessRole.WORKER, number)]
    if number == 0:
        return coordinator
    if number <= shards:
        return [ProcessName(ProcessRole.SHARD, number - 1)]
    return [ProcessName(ProcessRole.WORKER, number - 1 - shards)]


def _text(name: str, environ: Mapping[str, str]) -> str:
    if not environ.get(name):
        raise ConfigError(
            f"{name} is not set",
            remedy="start it in a task of Slurm, as in: srun --ntasks 4 ps-run --slurm train.py",
        )
    return environ[name]


def _number(name: str, environ: Mapping[str, str]) -> int:
    text = _text(name, environ)
    if (number := whole_number(text)) is None:
        raise ConfigError(f"{name} is no number", actual=repr(text), remedy="start ps-run --slurm with srun")
    return number
