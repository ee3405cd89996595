"""One run: a cluster that trains for a time, with faults or without, and what can be said of it afterwards."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

import ps_worker
from chaos.cluster import Cluster, Size
from chaos.disk import Disk
from chaos.plan import Fault, Kind
from chaos.readers import Reader, contradictions
from chaos.replay import replay
from chaos.training import OPTIMIZER, network, test_loss
from ps_protocol.security.roles import AccessRole

PATIENCE_SECONDS = 90.0
"""How long a cluster may take to start, and to recover from its last fault."""

_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has shown."""

    seconds: float
    #: Acknowledged to the workers from the first to the last moment of ``seconds``.
    steps: int
    #: Acknowledged at all, and the lives of workers that may each have had one more under way.
    acknowledged: int
    worker_lives: int
    #: Updates by shard.
    versions: Sequence[int]
    loss: float
    #: Whether the shards served the bits that their logs make.
    served_is_replayed: bool
    #: Lives of processes that ended by themselves, as "name: exit code".
    ended: Sequence[str]
    #: How often servers hung and were killed for that.
    hung: int = 0
    #: Versions of published weights that readers have seen, all together.
    weights_seen: int = 0
    #: What readers saw that cannot be.
    contradictions: Sequence[str] = ()

    @property
    def steps_per_second(self) -> float:
        """Progress."""
        return self.steps / self.seconds

    @property
    def counted_right(self) -> bool:
        """Whether each shard has applied what was acknowledged, and nothing twice as far as numbers can tell."""
        most = self.acknowledged + self.worker_lives
        return all(self.acknowledged <= version <= most for version in self.versions)


class Run:
    """Used by one thread, once."""

    def __init__(self, cluster: Cluster, disk: Disk | None, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._disk = disk
        self._say = say
        self._last = "no fault yet"
        #: What faults can hit.
        self.targets = cluster.targets("disk" if disk else None)

    def train(self, seconds: float, steps: float = float("inf"), faults: Sequence[Fault] = ()) -> Outcome:
        """Train for ``seconds``, or until ``steps`` were made. Raises TimeoutError where it does not get well."""
        cluster = self._cluster
        cluster.start()
        self._until(lambda: all(cluster.steps), "the first steps of all workers")
        security = cluster.settings("reader", AccessRole.READER)
        # One asks the job, one a relay that follows it.
        readers = [Reader(address, security, None) for address in (cluster.address, cluster.relay_address)]
        for reader in readers:
            reader.start()
        begun, before = time.monotonic(), sum(cluster.steps)
        self._pass_time(begun, seconds, steps, faults)
        passed, made = time.monotonic() - begun, sum(cluster.steps) - before
        self._until(self._all_well, "all processes to be well again")
        seen = [len(reader.seen) for reader in readers]
        self._until(
            lambda: all(len(r.seen) > count or r.failed for r, count in zip(readers, seen, strict=True)),
            "a version of weights at every reader",
        )
        for reader in readers:
            reader.stop()
        for worker in cluster.workers:
            worker.stop()
        acknowledged, lives = sum(cluster.steps), sum(worker.lives for worker in cluster.workers)
        served = self._served()
        held = replay(cluster.data, cluster.size.shards)["model"]
        return Outcome(
            seconds=passed,
            steps=made,
            acknowledged=acknowledged,
            worker_lives=lives,
            versions=held.versions,
            loss=test_loss(served),
            served_is_replayed=all(
                torch.equal(ours, theirs) for ours, theirs in zip(served.parameters(), held.tensors, strict=True)
            ),
            weights_seen=sum(len(reader.seen) for reader in readers),
            contradictions=contradictions(readers),
            hung=sum(process.hung for process in cluster.processes.values()),
            ended=[f"{p.name}: {code}" for p in cluster.processes.values() for code in p.ends],
        )

    def _pass_time(self, begun: float, seconds: float, limit: float, faults: Sequence[Fault]) -> None:
        due, healing = list(faults), list[tuple[float, Fault]]()
        told, before = begun, sum(self._cluster.steps)
        while (now := time.monotonic()) - begun < seconds and sum(self._cluster.steps) < limit:
            while due and now - begun >= due[0].at_seconds:
                fault = due.pop(0)
                self._last = f"{fault} at {now - begun:.0f} s"
                self._strike(fault)
                healing.append((now + fault.seconds, fault))
            for item in [item for item in healing if now >= item[0]]:
                healing.remove(item)
                self._heal(item[1])
            self._cluster.look_after()
            if now - told >= 5.0:
                steps = sum(self._cluster.steps)
                self._say(f"  {now - begun:5.0f} s  {(steps - before) / (now - told):6.1f} steps/s  {self._last}")
                told, before = now, steps
            time.sleep(_LOOK_SECONDS)
        for _, fault in healing:
            self._heal(fault)

    def _strike(self, fault: Fault) -> None:
        match fault.kind:
            case Kind.KILL:
                self._cluster.processes[fault.target].send(signal.SIGKILL)
            case Kind.FREEZE | Kind.HANG:
                self._cluster.processes[fault.target].send(signal.SIGSTOP)
            case Kind.CUT:
                self._cluster.links[fault.target].cut()
            case Kind.HUSH:
                self._cluster.links[fault.target].hush()
            case Kind.FULL if self._disk:
                self._disk.fill()

    def _heal(self, fault: Fault) -> None:
        match fault.kind:
            case Kind.FREEZE:
                self._cluster.processes[fault.target].send(signal.SIGCONT)
            case Kind.CUT | Kind.HUSH:
                self._cluster.links[fault.target].heal()
            case Kind.FULL if self._disk:
                self._disk.free()

    def _all_well(self) -> bool:
        """Whether every worker makes steps."""
        before = self._cluster.steps
        time.sleep(1.0)
        return all(now > then for now, then in zip(self._cluster.steps, before, strict=True))

    def _served(self) -> torch.nn.Module:
        """What a worker that comes now gets."""
        model = network()
        security = self._cluster.settings("worker", AccessRole.WORKER)
        with ps_worker.connect(
            self._cluster.address, device="cpu", transport=self._cluster.size.transport, security=security
        ) as reader:
            reader.optimizer(torch.optim.SGD, model, **OPTIMIZER)
        return model

    def _until(self, true: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not true():
            self._cluster.look_after()
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {PATIENCE_SECONDS:g} s for {what}; logs are in {self._cluster.folder}")
            time.sleep(_LOOK_SECONDS)


@contextmanager
def started(folder: Path, size: Size, *, own_disk: bool, say: Callable[[str], None]) -> Iterator[Run]:
    """A run in ``folder``, whose processes are gone afterwards. ``own_disk``: mounts are possible."""
    data = folder / "data"
    data.mkdir(parents=True)
    disk = Disk(data) if own_disk else None
    cluster = Cluster(folder, data, size)
    try:
        yield Run(cluster, disk, say)
    finally:
        cluster.close()
        if disk:
            disk.close()
