"""Owns one simulated cluster from its first event to the verdict: who runs, who is started again, what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ps_protocol.errors import PsError, Unavailable
from ps_server.coordinator.settings import ClusterSettings
from simulation.coordinator import SimCoordinator
from simulation.disk import Disk
from simulation.judge import Judge
from simulation.network import Network, Partition
from simulation.plan import Plan, random_mode
from simulation.scheduler import Scheduler, Violation
from simulation.shard import POINTS, SimShard
from simulation.worker import SimWorker
from simulation.world_parts import Shared


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to."""

    seed: int
    plan: Plan
    #: Empty when no promise was broken.
    violation: str
    story: str
    events: int
    pushes: int
    replies: int
    virtual_seconds: float
    #: How often each fault came.
    faults: dict[str, int]


class World:
    """One run. Everything happens in ``run``, in the calling thread."""

    def __init__(self, plan: Plan, *, loud: bool = False) -> None:
        self.plan = plan
        self.scheduler = scheduler = Scheduler(plan.seed)
        scheduler.loud = loud
        self._random = scheduler.random
        self.judge = Judge(plan.shards, durable=plan.durable)
        network = Network(
            scheduler,
            calls_lost=plan.calls_lost,
            calls_repeated=plan.calls_repeated,
            delay_seconds=plan.delay_seconds,
        )
        settings = ClusterSettings(
            expected_shards=plan.shards,
            expected_workers=plan.expected_workers,
            consistency=plan.consistency,
            lease_seconds=plan.lease_seconds,
            heartbeat_seconds=plan.heartbeat_seconds,
            seed=plan.seed,
        )
        coordinator = SimCoordinator(scheduler, network, self.judge, settings, plan.view_seconds)
        self.shared = Shared(scheduler, network, coordinator, self.judge, plan)
        self.disks = [Disk() for _ in range(plan.shards)]
        #: The process that holds each disk, while there is one.
        self.shards: list[SimShard | None] = [None] * plan.shards
        self.workers: list[SimWorker] = []
        self.to_finish = plan.workers
        #: A shard has come back without values, as it may.
        self.lost = False
        self.quiet = False
        self.faults: dict[str, int] = {}
        self._names = 0
        #: (disk, incarnation) as a backup took them.
        self._copies: list[tuple[int, Disk]] = []

    def run(self) -> Outcome:
        """Play the plan to its end and judge it."""
        scheduler, plan = self.scheduler, self.plan
        for number in range(plan.shards):
            scheduler.after(self._random.random() * 0.2, None, self.start_shard, number)
        spread = 1.0 if plan.workers <= 100 else 2.0
        for rank in range(plan.workers):
            scheduler.after(self._random.random() * spread, None, self.start_worker, rank)
        for fault in plan.faults:
            scheduler.at(fault.time, None, self._strike, fault.kind)
        scheduler.at(plan.quiet_at, None, self.heal)
        violation = ""
        try:
            scheduler.run(plan.ends_at, self._done)
            if not self._done():
                raise Violation(self._stuck())
            self._finish()
        except Violation as error:
            violation = str(error)
        return Outcome(
            plan.seed,
            plan,
            violation,
            scheduler.story(),
            scheduler.count,
            self.judge.pushes_applied,
            self.judge.replies,
            scheduler.now,
            self.faults,
        )

    # Processes

    def start_shard(self, number: int) -> None:
        """Start a process on the disk of shard ``number``, if nobody holds it."""
        if self.disks[number].held:
            return
        self.shards[number] = SimShard(self.shared, number, self.disks[number], self._name("shard", number), self._lost)

    def start_worker(self, rank: int | None) -> None:
        """Start a worker; it finishes the plan, or another is started in its place."""
        name = self._name("worker", rank if rank is not None else "any")
        self.workers.append(SimWorker(self.shared, name, rank, lambda worker, how: self._ended(worker, rank, how)))

    def live_workers(self) -> list[SimWorker]:
        """Those whose process lives."""
        return [worker for worker in self.workers if worker.process.alive]

    def live_shards(self) -> list[SimShard]:
        """Those whose process lives."""
        return [shard for shard in self.shards if shard is not None and shard.process.alive]

    def _name(self, role: str, number: object) -> str:
        self._names += 1
        return f"{role}-{number}.{self._names}"

    def _pause(self) -> float:
        """How long until a supervisor starts a process again."""
        longest = 1.0 if self.quiet else 8.0
        return 0.1 + self._random.random() * longest

    def _lost(self, shard: SimShard) -> None:
        number = shard.number
        if self.shards[number] is shard:
            self.shards[number] = None
            self.scheduler.after(self._pause(), None, self.start_shard, number)

    def _ended(self, worker: SimWorker, rank: int | None, how: str) -> None:
        self.workers.remove(worker)
        self.scheduler.say(worker.process.name, how)
        # Without a log a shard that dies before its first snapshot is whole has nothing, and the job says so and ends.
        self.lost = self.lost or (how == "lost" and not self.plan.durable)
        if how == "finished" or self.shared.coordinator.finished:
            # Once the job is finished, whoever comes would be the first of a new run, and wait for the others.
            self.to_finish -= 1
        elif how != "replaced":
            self.scheduler.after(self._pause(), None, self.start_worker, rank)

    # The end

    def _done(self) -> bool:
        return self.to_finish <= 0 or self.lost

    def _stuck(self) -> str:
        doing = "\n  ".join(worker.doing() for worker in self.live_workers()[:12])
        return (
            f"{self.to_finish} workers have not finished {self.plan.ends_at - self.plan.quiet_at:.0f} s after the last "
            f"fault:\n  {doing}"
        )

    def _finish(self) -> None:
        finals = {}
        for shard in self.live_shards():
            if shard.replica is not None and shard.replica.initialised:
                finals[shard.number] = (shard.tracker.version, shard.replica.values)
        # What is still in a lane is not in the values.
        idle = {shard.number for shard in self.live_shards() if shard.idle}
        self.judge.finish({number: final for number, final in finals.items() if number in idle})
        for shard in self.live_shards():
            shard.end()
        numbers = range(self.plan.shards)
        for number in numbers if len(numbers) <= 8 else self._random.sample(numbers, 8):
            disk = self.disks[number]
            restored = SimShard(self.shared, number, disk, self._name("shard", number), lambda shard: None)
            restored.process.die()

    # Faults

    def heal(self) -> None:
        """From now on nothing goes wrong any more."""
        self.quiet = True
        network = self.shared.network
        network.partitions.clear()
        network.calls_lost = network.calls_repeated = 0.0
        self.shared.coordinator.journal.refuses = False
        for disk in self.disks:
            disk.full = False
        for shard in self.live_shards():
            shard.armed.clear()
        self._restart_coordinator()
        self.scheduler.say("faults end")

    def _restart_coordinator(self) -> None:
        coordinator = self.shared.coordinator
        if coordinator.process.alive:
            return
        try:
            coordinator.start()
        except Unavailable:
            coordinator.process.alive = False
            self.scheduler.after(0.5, None, self._restart_coordinator)

    def _strike(self, kind: str) -> None:
        strike: Callable[[], bool] = getattr(self, f"_{kind}")
        if strike():
            self.faults[kind] = self.faults.get(kind, 0) + 1
            self.scheduler.say("fault:", kind)

    def _until(self, longest: float) -> float:
        """A moment up to ``longest`` seconds from now, before faults end."""
        return min(self.plan.quiet_at, self.scheduler.now + self._random.random() * longest)

    def _worker_crash(self) -> bool:
        workers = self.live_workers()
        if workers:
            self._random.choice(workers).crash()
        return bool(workers)

    def _killable(self) -> list[SimShard]:
        """Without a log all the time, a shard that has no snapshot yet would lose what can never come back."""
        durable = self.plan.durable
        return [
            s for s in self.live_shards() if durable or (s.disk.snapshot is not None and s.disk.snapshot.initialised)
        ]

    def _shard_crash(self) -> bool:
        shards = self._killable()
        if not shards:
            return False
        shard, point = self._random.choice(shards), self._random.choice(["now", *POINTS])
        if point == "now":
            shard.end()
        else:
            shard.armed[point] = self._random.randrange(1, 6)
        return True

    def _coordinator_crash(self) -> bool:
        coordinator = self.shared.coordinator
        if coordinator.process.alive:
            coordinator.crash()
            self.scheduler.at(self._until(30.0), None, self._restart_coordinator)
        return True

    def _partition(self) -> bool:
        names = ["coordinator", *(s.process.name for s in self.live_shards())]
        names += [w.process.name for w in self.live_workers()]
        if len(names) < 2:
            return False
        one = frozenset(self._random.sample(names, self._random.randrange(1, max(2, len(names) // 3))))
        other = [name for name in names if name not in one]
        few = self._random.random() < 0.5
        other_side = frozenset(self._random.sample(other, self._random.randrange(1, 1 + len(other))) if few else other)
        partition = Partition(one, other_side, self._until(15.0))
        self.shared.network.partitions = [p for p in self.shared.network.partitions if p.until > self.scheduler.now] + [
            partition
        ]
        for worker in self.live_workers():
            for lane in worker.lanes:
                stream = lane.stream
                parted = stream is not None and partition.parts(worker.process.name, stream.shard.process.name)
                if stream is not None and parted and self._random.random() < 0.5:
                    stream.break_off()
        return True

    def _stream_break(self) -> bool:
        chance = self._random.choice([0.05, 0.5, 1.0])
        for worker in self.live_workers():
            for lane in worker.lanes:
                if lane.stream is not None and self._random.random() < chance:
                    lane.stream.break_off()
        return True

    def _stop_worker(self) -> bool:
        workers = self.live_workers()
        if workers:
            self._random.choice(workers).process.stopped_until = self._until(12.0)
        return bool(workers)

    def _stop_shard(self) -> bool:
        shards = self.live_shards()
        if shards:
            self._random.choice(shards).process.stopped_until = self._until(12.0)
        return bool(shards)

    def _stop_coordinator(self) -> bool:
        self.shared.coordinator.process.stopped_until = self._until(12.0)
        return True

    def _disk_full(self) -> bool:
        disk = self._random.choice(self.disks)
        disk.full = True
        self.scheduler.at(self._until(6.0), None, setattr, disk, "full", False)
        return True

    def _journal_refuses(self) -> bool:
        journal = self.shared.coordinator.journal
        journal.refuses = True
        self.scheduler.at(self._until(6.0), None, setattr, journal, "refuses", False)
        return True

    def _mode(self) -> bool:
        coordinator = self.shared.coordinator
        mode = random_mode(self._random, self.plan.expected_workers)
        if not coordinator.process.alive:
            return False
        coordinator.set_consistency(self._told_mode, mode)
        return True

    def _told_mode(self, value: object) -> None:
        self.scheduler.say("mode:", value if isinstance(value, PsError) else "changed")

    def _worker_joins(self) -> bool:
        self.to_finish += 1
        self.start_worker(None)
        return True

    def _worker_replaced(self) -> bool:
        """Another process takes the rank of one that still runs."""
        workers = [worker for worker in self.live_workers() if worker.rank is not None and not worker.replaced]
        if not workers:
            return False
        worker = self._random.choice(workers)
        worker.replaced = True
        self.start_worker(worker.rank)
        return True

    def _old_copy(self) -> bool:
        """Keep a copy of a disk, or start a process from one kept before while the right one runs."""
        number = self._random.randrange(self.plan.shards)
        self._copies.append((number, self.disks[number].copied()))
        if len(self._copies) > 1 and self._random.random() < 0.7:
            number, disk = self._copies.pop(0)
            newest = self.disks[number].incarnation
            if 0 < disk.incarnation < newest and self.judge.acknowledged_by(number) == newest:
                name = self._name("copy-of-shard", number)
                SimShard(self.shared, number, disk, name, lambda shard: None, from_old_copy=True)
        return True

    def _all_crash(self) -> bool:
        if not self.plan.durable:
            return False
        for shard in self.live_shards():
            shard.end()
        for worker in self.live_workers():
            worker.crash()
        return self._coordinator_crash()
