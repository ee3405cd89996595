"""The command: a cluster under attack, a job that trains beside it, and a report; it fails for any harm done."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from google.protobuf.message import Message

from chaos.processes import Process
from chaos.training import read_counter
from fuzz.attack import Attack, Tally, attack_sockets
from fuzz.identity import Identity
from fuzz.messages import Generator
from ps_protocol import PROTOCOL_VERSION
from ps_protocol.launch.ports import free_port
from ps_protocol.v1 import coordinator_pb2, shard_pb2

ROLES = ("coordinator", "shard", "socket")

MOST_GROWTH_BYTES = 100 << 20
"""How much a server may grow from the first part of an attack to its end."""

STEPS_AFTER = 20
"""Steps that the canary makes after an attack, to show that it goes on."""

START_SECONDS = 300.0
"""Compiling what tables need takes half a minute on an idle core."""

STALLED_SECONDS = 30.0
"""A job beside the attack that makes no step for so long counts as hung."""

_WARM = 0.1
"""Part of the messages after which memory is first looked at."""

#: Calls that hold up everybody by what they are for, or that make much of little, come seldom.
_WEIGHTS = {"Join": 0.05, "Pause": 0.05, "CatchUp": 0.05, "Capture": 0.2, "Checkpoint": 0.02, "Watch": 0.2}


@dataclass
class Watched:
    """What is looked at while the attack goes on."""

    canary: Path
    servers: dict[str, Process]
    first: dict[str, int] = field(default_factory=dict)
    longest_stall_seconds: float = 0.0
    _memory: dict[str, int] = field(default_factory=dict)
    _steps: int = 0
    _moved: float = field(default_factory=time.monotonic)

    def look(self) -> None:
        """Note the memory of the servers, and the canary's progress."""
        self._memory = {
            name: psutil.Process(pid).memory_info().rss
            for name, process in self.servers.items()
            if (pid := process.pid)
        }
        now, steps = time.monotonic(), read_counter(self.canary)
        if steps > self._steps:
            self._steps, self._moved = steps, now
        self.longest_stall_seconds = max(self.longest_stall_seconds, now - self._moved)

    def warm(self) -> None:
        """Growth counts from here."""
        self.first = dict(self._memory)

    def growth_bytes(self, name: str) -> int:
        """Of the resident memory of one server."""
        return self._memory.get(name, 0) - self.first[name]


class Attacked:
    """A coordinator, a durable shard, and a canary that trains on it. Ended by ``close``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.coordinator, self.shard = (f"127.0.0.1:{free_port()}" for _ in range(2))
        data, port = str(folder / "data"), self.coordinator.rpartition(":")[2]
        job = ("--port", port, "--bind", "127.0.0.1", "--shards", "1", "--data-dir", data, "--seed", "1")
        kept = ("--checkpoint-dir", str(folder / "checkpoints"))
        place = ("--shard", "0", "--coordinator", self.coordinator, "--port", self.shard.rpartition(":")[2])
        held = ("--bind", "127.0.0.1", "--data-dir", data, "--durability", "durable", "--threads", "1")
        self.servers = {
            "coordinator": self._process("coordinator", ("-m", "ps_server.coordinator.main", *job, *kept)),
            "shard": self._process("shard", ("-m", "ps_server.shard.main", *place, *held)),
        }
        self.steps = folder / "canary.steps"
        trained = ("-m", "fuzz.canary", str(self.steps), "bulk")
        self.canary = self._process("canary", trained, PS_COORDINATOR=self.coordinator)

    def start(self) -> None:
        """Start everything, and return when the canary has made steps."""
        for process in (*self.servers.values(), self.canary):
            process.start()
        deadline = time.monotonic() + START_SECONDS
        while read_counter(self.steps) < 3:
            if not self.canary.alive or time.monotonic() > deadline:
                raise TimeoutError(f"the job does not train; logs are in {self.folder}")
            time.sleep(0.1)

    def close(self) -> None:
        """End everything at once."""
        for process in (self.canary, *self.servers.values()):
            process.stop(signal.SIGKILL)

    def _process(self, name: str, command: Sequence[str], **environment: str) -> Process:
        return Process(name, lambda life: command, self.folder / f"{name}.log", environment)


@dataclass(frozen=True)
class Permitted:
    """Leaves out what every caller may do to the whole job as long as there are no keys, and others' places."""

    identity: Identity

    def __call__(self, message: Message) -> bool:
        """Whether ``message`` may be sent."""
        match message:
            case coordinator_pb2.SetConsistencyRequest():
                return message.consistency.mode not in (1, 2, 3)
            case coordinator_pb2.RestoreCheckpointRequest() | coordinator_pb2.ReshardRequest():
                return False
            case coordinator_pb2.JoinRequest():
                return message.role not in (coordinator_pb2.ROLE_SHARD, coordinator_pb2.ROLE_STANDBY)
            case coordinator_pb2.LeaveRequest():
                # A caller that has gone gets no further than the first check.
                return message.incarnation not in (self.identity.incarnation, *self.identity.others)
            case shard_pb2.PauseRequest() | shard_pb2.CatchUpRequest():
                return not 0.05 < message.seconds < float("inf")
            case shard_pb2.RestoreRequest():
                return False
        return not any(value in self.identity.others for value in _incarnations(message))


def _incarnations(message: Message) -> Iterator[int]:
    for descriptor, value in message.ListFields():
        if descriptor.name in ("incarnation", "primary"):
            yield value
        elif descriptor.message_type and not descriptor.message_type.GetOptions().map_entry:
            for each in value if descriptor.is_repeated else (value,):
                yield from _incarnations(each)


async def attack(role: str, attacked: Attacked, seed: int, messages: int) -> Tally:
    """Send ``messages`` to one role. Returns what came back."""
    identity = Identity(attacked.coordinator, f"target of {role} by {seed}")
    await identity.join()
    await identity.load(attacked.shard)
    pools = {
        "model": (*[identity.model] * 30, "other"),
        "rank": (*[identity.rank] * 10, 0, 99),
        "index": (*[identity.rank] * 10, 0, 99),
        "incarnation": (*[identity.incarnation] * 10, 1 << 40),
        "epoch": (*[identity.epoch] * 10, 0, 1 << 63),
        "protocol_version": (PROTOCOL_VERSION, PROTOCOL_VERSION, 1),
        "payload": (bytes(identity.region_bytes), bytes(identity.region_bytes), b"", b"\xff" * identity.region_bytes),
        "wait_seconds": (0.0, 0.01, float("nan")),
        "seconds": (0.01, float("nan"), float("inf"), -1.0),
        "membership_revision": (0, 0, 0, 1 << 62),
        "known_revision": (0,),
    }
    generator, guard = Generator(seed, pools), Permitted(identity)
    try:
        if role == "socket":
            return await attack_sockets(attacked.shard, identity, generator, guard, messages)
        module, address = (
            (coordinator_pb2, attacked.coordinator) if role == "coordinator" else (shard_pb2, attacked.shard)
        )
        (service,) = module.DESCRIPTOR.services_by_name.values()
        sent = Attack(address, service, generator, identity, guard, _WEIGHTS)
        await sent.run(messages)
        return sent.tally
    finally:
        await identity.leave()


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 20))
    parser.add_argument("--messages", type=int, default=300_000, help="to each role (default: %(default)s)")
    parser.add_argument("--role", choices=ROLES, action="append", help="one role; may be repeated (default: all)")
    parser.add_argument("--folder", type=Path, help="keeps the logs of all processes; default: a temporary one")
    return parser.parse_args()


def run(roles: Sequence[str], seed: int, messages: int, folder: Path) -> list[str]:
    """Attack one role after the other of a fresh cluster, with a report for each; what was broken."""
    folder.mkdir(parents=True, exist_ok=True)
    attacked = Attacked(folder)
    broken = []
    try:
        attacked.start()
        for role in roles:
            watched = Watched(attacked.steps, attacked.servers)
            began = time.monotonic()
            tally = asyncio.run(_attacked(role, attacked, watched, seed, messages))
            seconds, before = time.monotonic() - began, read_counter(attacked.steps)
            _wait_for_steps(attacked, before + STEPS_AFTER)
            broken += [f"{role}: {line}" for line in _broken(attacked, watched, tally, before)]
            for line in _lines(role, tally, watched, seconds):
                print(line, flush=True)
        broken += _recovered(attacked)
        broken += _logged(attacked)
    finally:
        attacked.close()
    return broken


async def _attacked(role: str, attacked: Attacked, watched: Watched, seed: int, messages: int) -> Tally:
    # The first part warms up what servers allocate once.
    await _watching(watched, asyncio.create_task(attack(role, attacked, seed + 1, max(1, int(messages * _WARM)))))
    watched.warm()
    return await _watching(watched, asyncio.create_task(attack(role, attacked, seed, messages)))


async def _watching(watched: Watched, work: asyncio.Task[Tally]) -> Tally:
    for number in itertools.count(1):
        done, _ = await asyncio.wait([work], timeout=1.0)
        watched.look()
        if done:
            break
        if number % 15 == 0:
            print(f"  {number} s: canary {read_counter(watched.canary)} steps", flush=True)
    return work.result()


def _wait_for_steps(attacked: Attacked, steps: int, seconds: float = STALLED_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while attacked.canary.alive and read_counter(attacked.steps) < steps and time.monotonic() < deadline:
        time.sleep(0.1)


def _lines(role: str, tally: Tally, watched: Watched, seconds: float) -> Iterator[str]:
    """The report on one role."""
    growth = ", ".join(f"{name} {watched.growth_bytes(name) / 2**20:+.1f} MB" for name in watched.first)
    yield f"{role}: {tally.total} messages in {seconds:.0f} s, each answer as the protocol has it unless said below"
    yield f"  canary: {read_counter(watched.canary)} steps, longest wait {watched.longest_stall_seconds:.1f} s"
    yield f"  memory since the first tenth: {growth}"
    statuses = Counter[str]()
    for (_, status), count in tally.answers.items():
        statuses[status] += count
    yield "  calls: " + ", ".join(f"{count} {status}" for status, count in statuses.most_common())


def _recovered(attacked: Attacked) -> Iterator[str]:
    """Kill the shard and start it again: everything it was sent is in its log."""
    shard, before = attacked.servers["shard"], read_counter(attacked.steps)
    shard.stop(signal.SIGKILL)
    shard.start()
    _wait_for_steps(attacked, before + STEPS_AFTER, START_SECONDS)
    if not (shard.alive and attacked.canary.alive) or read_counter(attacked.steps) < before + STEPS_AFTER:
        yield f"the shard does not come back from its log; see {shard.log} and {attacked.canary.log}"
    print(f"killed and started again: canary {read_counter(attacked.steps)} steps", flush=True)


def _logged(attacked: Attacked) -> Iterator[str]:
    for process in attacked.servers.values():
        if tracebacks := process.log.read_text(errors="replace").count("Traceback"):
            yield f"{process.name} logged {tracebacks} tracebacks; see {process.log}"


def _broken(attacked: Attacked, watched: Watched, tally: Tally, before: int) -> Iterator[str]:
    for process in (*attacked.servers.values(), attacked.canary):
        if not process.alive:
            yield f"{process.name} has ended; see {process.log}"
    if read_counter(attacked.steps) < before + STEPS_AFTER:
        yield f"the canary makes no steps after the attack; see {attacked.canary.log}"
    if watched.longest_stall_seconds > STALLED_SECONDS:
        yield f"the canary stood still for {watched.longest_stall_seconds:.0f} s"
    for name in watched.first:
        if (growth := watched.growth_bytes(name)) > MOST_GROWTH_BYTES:
            yield f"{name} grew by {growth >> 20} MB"
    yield from tally.untyped


def main() -> None:
    """Exit code 0 when nothing was harmed."""
    told = arguments()
    print(f"seed {told.seed}: {told.messages} messages to each role", flush=True)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
        broken = run(told.role or ROLES, told.seed, told.messages, told.folder or Path(temporary))
    for line in broken:
        print(f"BROKEN  {line}")
    print(f"seed {told.seed}: {'broken' if broken else 'nothing was harmed'}")
    sys.exit(int(bool(broken)))
