"""Does what goes wrong in a run: each kind of fault is one method."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.errors import Retryable
from ps_protocol.model.spec import ShardMap
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.directory import latest
from simulation.judge import Judge
from simulation.observers.checkpoints import tell_of_checkpoint
from simulation.observers.subjects import Subjects
from simulation.plan import random_mode
from simulation.processes import Processes
from simulation.programs import CoordinatorProgram, ShardProgram, WorkerProgram
from simulation.runtime.disk import Disk
from simulation.runtime.kernel import Kernel, Killed, Process
from simulation.runtime.network import Partition
from simulation.runtime.wait import sleep

_TRIES = 8

POINTS_OF_HOSTS = ("gathered", "summed", "answered", "told", "deposited", "before_copy", "after_copy")
"""Where a worker may end in an exchange of its host, as leader and as follower."""


class Faults:
    """Called at the times of the plan."""

    def __init__(self, kernel: Kernel, judge: Judge, subjects: Subjects, processes: Processes) -> None:
        self._kernel = kernel
        self._random = kernel.random
        self._judge = judge
        self._subjects = subjects
        self._processes = processes
        self._network = processes.network
        self._plan = processes.plan
        #: How often each came.
        self.counts: dict[str, int] = {}
        #: (shard, incarnation, disk) as a backup took them.
        self._copies: list[tuple[int, int, Disk]] = []

    def begin(self) -> None:
        """Have the faults of the plan come, and end."""
        for fault in self._plan.faults:
            self._kernel.schedule(fault.time, None, self._strike, fault.kind)
        self._kernel.schedule(self._plan.quiet_at, None, self.heal)

    def heal(self) -> None:
        """From now on nothing goes wrong any more."""
        processes = self._processes
        processes.quiet = True
        self._subjects.points.clear()
        self._network.heal()
        for disk in (*processes.disks, processes.coordinator_disk):
            disk.full = False
        for shard in processes.live_shards:
            shard.disarm()
        if processes.coordinator is not None:
            processes.coordinator.disarm()
        for process in processes.alive:
            if process.stopped:
                process.resume()
        self._kernel.say("faults end")

    def _strike(self, kind: str) -> None:
        if self._processes.is_trained:
            return  # Readers are still there: a worker that joins now would be the first of another run.
        strike: Callable[[], bool] = getattr(self, f"_{kind}")
        if strike():
            self.counts[kind] = self.counts.get(kind, 0) + 1
            self._kernel.say("fault:", kind)

    def _until(self, longest: float) -> float:
        """Seconds, up to ``longest``, that end before faults do."""
        return max(0.0, min(self._plan.quiet_at - self._kernel.now, self._random.random() * longest))

    def _worker_crash(self) -> bool:
        workers = self._processes.workers
        if workers:
            self._processes.kill_worker(self._random.choice(workers))
        return bool(workers)

    def _killable(self) -> list[ShardProgram]:
        """Without a log all the time, a shard that has no snapshot yet loses what never comes back: not so often."""
        shards = self._processes.live_shards
        if self._plan.durable or self._random.random() < 0.15:
            return shards
        return [shard for shard in shards if any(shard.disk.path.glob("*/snapshots/[0-9]*"))]

    def _shard_crash(self) -> bool:
        shards = self._killable()
        if not shards:
            return False
        shard, point = self._random.choice(shards), self._random.choice(["now", *ShardProgram.POINTS])
        if point == "now":
            shard.process.kill()
        else:
            shard.arm(point, self._random.randrange(1, 6))
        return True

    def _snapshot_crash(self) -> bool:
        """A shard dies while it makes sure that something is on its disk, most often a part of a snapshot."""
        shards = self._processes.live_shards
        if shards:
            self._random.choice(shards).arm("sync", self._random.randrange(1, 8))
        return bool(shards)

    def _coordinator_crash(self) -> bool:
        coordinator, point = self._processes.coordinator, self._random.choice(["now", *CoordinatorProgram.POINTS])
        if coordinator is not None and point != "now":
            coordinator.arm(point, self._random.randrange(1, 6))
        else:
            self._processes.kill_coordinator(self._until(30.0))
        return True

    def _partition(self) -> bool:
        names = [process.name for process in self._processes.alive]
        if len(names) < 2:
            return False
        one = frozenset(self._random.sample(names, self._random.randrange(1, max(2, len(names) // 3))))
        other = [name for name in names if name not in one]
        few = self._random.random() < 0.5
        other_side = frozenset(self._random.sample(other, self._random.randrange(1, 1 + len(other))) if few else other)
        self._network.part(Partition(one, other_side, self._kernel.now + self._until(15.0)))
        return True

    def _stream_break(self) -> bool:
        chance = self._random.choice([0.05, 0.5, 1.0])
        for worker in self._processes.workers:
            for call in self._network.calls_of(worker.process):
                if call.method.endswith("/Step") and self._random.random() < chance:
                    self._network.break_off(call)
        return True

    def _stop(self, process: Process) -> None:
        process.stop()
        self._kernel.schedule(self._until(12.0), None, process.resume)

    def _stop_worker(self) -> bool:
        workers = self._processes.workers
        if workers:
            self._stop(self._random.choice(workers).process)
        return bool(workers)

    def _host(self) -> bool:
        """A worker is killed, or stands still, at some point of an exchange of its host."""
        workers = self._processes.workers
        if workers:
            worker, point = self._random.choice(workers), self._random.choice(POINTS_OF_HOSTS)
            stands = self._random.random() < 0.4
            self._subjects.points[worker.process] = point, lambda: self._strike_at_point(worker, stands=stands)
        return bool(workers)

    def _strike_at_point(self, worker: WorkerProgram, *, stands: bool) -> None:
        """In the thread of ``worker``."""
        if stands:
            self._stop(worker.process)
            sleep(0.0)
        elif worker in self._processes.workers:
            self._processes.kill_worker(worker)
            raise Killed

    def _reader(self) -> bool:
        readers = self._processes.readers
        if readers:
            reader = self._random.choice(readers)
            if self._random.random() < 0.3:
                self._stop(reader.process)
            else:
                self._processes.kill_reader(reader)
        return bool(readers)

    def _relay(self) -> bool:
        """It is killed, stands still, or is cut off from shards, and perhaps from the coordinator."""
        if (relay := self._processes.relay) is None:
            return False
        match self._random.choice(("kill", "kill", "stop", "cut", "cut")):
            case "kill":
                self._processes.kill_relay()
            case "stop":
                self._stop(relay.process)
            case _:
                names = [shard.process.name for shard in self._processes.live_shards]
                few = self._random.sample(names, self._random.randrange(len(names) + 1))
                others = frozenset(few or [*names, "coordinator"])
                until = self._kernel.now + self._until(15.0)
                self._network.part(Partition(frozenset((relay.process.name,)), others, until))
        return True

    def _stop_shard(self) -> bool:
        shards = self._processes.live_shards
        if shards:
            self._stop(self._random.choice(shards).process)
        return bool(shards)

    def _stop_coordinator(self) -> bool:
        if self._processes.coordinator is not None:
            self._stop(self._processes.coordinator.process)
        return True

    def _fill(self, disk: Disk) -> bool:
        disk.full = True
        self._kernel.schedule(self._until(6.0), None, setattr, disk, "full", False)
        return True

    def _disk_full(self) -> bool:
        return self._fill(self._random.choice(self._processes.disks))

    def _full_restart(self) -> bool:
        """A shard is killed while its disk is full; that may have room again before it is started, or a while later."""
        place = self._random.randrange(len(self._processes.disks))
        disk, seconds = self._processes.disks[place], self._until(6.0)
        disk.full = True

        def kill() -> None:
            shard = self._processes.shards[place]
            if shard is not None and shard.disk is disk:
                shard.process.kill()

        self._kernel.schedule(seconds, None, kill)
        self._kernel.schedule(
            seconds + self._random.choice([0.0, self._until(3.0)]), None, setattr, disk, "full", False
        )
        return True

    def _journal_refuses(self) -> bool:
        return self._fill(self._processes.coordinator_disk)

    def _mode(self) -> bool:
        mode = random_mode(self._random, self._plan.expected_workers)
        self._processes.command("psctl", lambda client: client.set_consistency(mode))
        return True

    def _checkpoint(self) -> bool:
        self._processes.command("psctl", lambda client: client.checkpoint())
        return True

    def _restore(self) -> bool:
        """The newest checkpoint is restored into the running job, again until it is whole."""

        def action(client: CoordinatorClient) -> None:
            for _ in range(_TRIES):
                try:
                    client.restore_checkpoint()
                    return
                except Retryable:
                    sleep(1.0)

        self._processes.command("psctl", action)
        return True

    def _new_job(self) -> bool:
        """Everything ends, and a job begins with --restore of the newest checkpoint, if that has every model."""
        folder = latest(self._processes.coordinator_disk.shared)
        if folder is None or len(Checkpoint.open(folder).manifest.models) < self._plan.models:
            return False
        tell_of_checkpoint(self._subjects, folder)
        self._copies.clear()
        self._processes.begin_job(folder)
        return True

    def _move(self) -> bool:
        """One variable or table moves to one shard, while every shard keeps a slice."""
        if (shard_map := self._any_model()) is None:
            return False
        spec = shard_map.spec
        names = [variable.name for variable in spec.variables] + [table.name for table in spec.tables]
        name = self._random.choice(names)
        target = self._random.randrange(self._plan.shards)
        if not self._all_keep_something(spec.name, name, target):
            return False
        self._reshard(
            lambda client: client.move((target,), (), spec.name, name),
            lambda: self._all_keep_something(spec.name, name, target),
        )
        return True

    def _balance(self) -> bool:
        """Slices and rows leave shards that have more than others."""
        if self._any_model() is None:
            return False
        self._reshard(lambda client: client.move(), lambda: True)
        return True

    def _reshard(self, move: Callable[[CoordinatorClient], Iterable[object]], is_wanted: Callable[[], bool]) -> None:
        def action(client: CoordinatorClient) -> None:
            for _ in range(_TRIES):
                if not is_wanted():
                    return
                try:
                    for _progress in move(client):
                        pass
                    return
                except Retryable:
                    sleep(1.0)

        self._processes.command("psctl", action)

    def _any_model(self) -> ShardMap | None:
        """The newest placement of one of the models; None: there is none yet."""
        maps = self._judge.coordinator.shard_maps
        return maps[0] if len(maps) == 1 else self._random.choice(maps) if maps else None

    def _all_keep_something(self, model: str, name: str, target: int) -> bool:
        """Whether every shard holds a slice when ``name`` is on ``target``, by the newest shard map."""
        shard_map = self._judge.coordinator.shard_map(model)
        if shard_map is None:
            return False  # Another job has begun, and the model is not placed yet.
        stay = {piece.shard for piece in shard_map.slices if shard_map.spec.variables[piece.variable].name != name}
        going = {target} if name in {variable.name for variable in shard_map.spec.variables} else set()
        return stay | going == set(range(self._plan.shards))

    def _release(self) -> bool:
        """An operator releases a model, which workers may use."""
        if (shard_map := self._any_model()) is None:
            return False
        self._processes.command("psctl", lambda client: client.release_model(shard_map.spec.name))
        return True

    def _worker_joins(self) -> bool:
        self._processes.to_finish += 1
        self._processes.start_worker(None)
        return True

    def _worker_replaced(self) -> bool:
        """Another process takes the rank of one that still runs."""
        workers = [each for each in self._processes.workers if each.rank is not None and not each.replaced]
        if not workers:
            return False
        worker = self._random.choice(workers)
        worker.replaced = True
        self._processes.start_worker(worker.rank)
        return True

    def _old_copy(self) -> bool:
        """Keep a copy of a disk, or start a process from one kept before while the right one runs."""
        if self._plan.standby:
            return False
        processes, number = self._processes, self._random.randrange(self._plan.shards)
        copy = processes.disks[number].copied(processes.name("copy", number))
        self._copies.append((number, processes.incarnations[number], copy))
        if len(self._copies) > 1 and self._random.random() < 0.7:
            number, incarnation, disk = self._copies.pop(0)
            newest = processes.incarnations[number]
            if 0 < incarnation < newest and self._judge.acknowledged_by(number) == newest:
                processes.start_on(disk, number, processes.name("copy-of-shard", number))
        return True

    def _all_crash(self) -> bool:
        if not self._plan.durable:
            return False
        for shard in self._processes.live_shards:
            shard.process.kill()
        for worker in list(self._processes.workers):
            self._processes.kill_worker(worker)
        return self._coordinator_crash()
