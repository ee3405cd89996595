"""Owns the processes and disks of one simulated cluster: starts them, and starts them again when they have ended."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.errors import InternalError, PsError
from ps_server.cli.options.checkpoint import CheckpointConfig
from ps_server.coordinator.settings import ClusterSettings
from simulation.judge import Judge
from simulation.observers.checkpoints import beginning_of
from simulation.observers.subjects import Subjects
from simulation.plan import Plan
from simulation.programs import (
    COORDINATOR,
    RELAY,
    CoordinatorProgram,
    ReaderProgram,
    RelayProgram,
    ShardProgram,
    WorkerProgram,
)
from simulation.runtime.disk import Disk, Files
from simulation.runtime.kernel import Kernel, Process
from simulation.runtime.network import Network
from simulation.runtime.threads import Thread


class Processes:
    """One per run."""

    def __init__(
        self, kernel: Kernel, network: Network, files: Files, judge: Judge, subjects: Subjects, plan: Plan, root: Path
    ) -> None:
        """``root`` is an empty folder for the disks."""
        self.plan = plan
        self.network = network
        #: By place: first one for each shard, then the standbys.
        self.shards: list[ShardProgram | None] = [None] * (plan.shards * (2 if plan.standby else 1))
        self.workers: list[WorkerProgram] = []
        self.readers: list[ReaderProgram] = []
        self.coordinator: CoordinatorProgram | None = None
        self.relay: RelayProgram | None = None
        self.disks = [self._disk(root, f"shard-{place}") for place in range(len(self.shards))]
        self.coordinator_disk = Disk(root, "coordinator")
        self._root = root
        #: Jobs that ended before this one, and the checkpoint that it began with.
        self._jobs = 0
        self._restored: Path | None = None
        self._checkpoints = CheckpointConfig(self.coordinator_disk.shared if plan.has_checkpoints else None)
        #: Workers that have not done their work.
        self.to_finish = plan.workers
        #: Readers that have not followed the job to its end.
        self.to_read = plan.readers
        #: A shard has come back without values, as it may.
        self.lost = False
        #: Faults have ended: what has ended is started again soon.
        self.quiet = False
        self._kernel = kernel
        self._random = kernel.random
        self._files = files
        self._judge = judge
        self._subjects = subjects
        self._names = 0
        self._closed = False
        self._settings = ClusterSettings(
            expected_shards=plan.shards,
            expected_workers=plan.expected_workers,
            consistency=plan.consistency,
            lease_seconds=plan.lease_seconds,
            heartbeat_seconds=plan.heartbeat_seconds,
            seed=plan.seed,
            job_id="job-0",
        )

    @property
    def done(self) -> bool:
        """Whether the job is over, and everybody has read what it published."""
        return self.is_trained and (self.lost or self.to_read <= 0 or self._all_has_been_read())

    @property
    def is_trained(self) -> bool:
        """Whether the job is over."""
        return self.to_finish <= 0 or self.lost

    def _all_has_been_read(self) -> bool:
        """Whether no reader lacks a version, and none will hear that the job is finished: a lost worker may come."""
        published = self._judge.published
        has = [reader.has[1] if reader.has[0] == published.job else 0 for reader in self.readers]
        return (
            sum(not published.is_behind(number) for number in has) == self.to_read
            and not self._judge.coordinator.finished
        )

    @property
    def alive(self) -> list[Process]:
        """All that run."""
        programs = [self.coordinator, *self.shards, *self.workers, *self.readers, self.relay]
        return [program.process for program in programs if program is not None and program.process.alive]

    @property
    def live_shards(self) -> list[ShardProgram]:
        """Those whose process runs."""
        return [shard for shard in self.shards if shard is not None and shard.process.alive]

    def begin(self) -> None:
        """Start everything, one after another."""
        plan = self.plan
        self._later(0.0, self.start_coordinator)
        for place in range(len(self.shards)):
            self._later(self._random.random() * 0.2, self.start_shard, place)
        for rank in range(plan.workers):
            self._later(self._random.random(), self.start_worker, rank)
        for number in sorted({*range(plan.readers)} - {reader.number for reader in self.readers}):
            self._later(3.0 * self._random.random(), self._start_reader, number)
        if plan.relayed and self.relay is None:
            self._start_relay_in(self._random.random())

    def start_coordinator(self) -> None:
        """Start it on its disk."""
        if self.coordinator is None:
            self.coordinator = CoordinatorProgram(
                self._kernel,
                "coordinator",
                self.coordinator_disk,
                self._settings,
                self._checkpoints,
                self._restored,
                self._coordinator_ended,
            )
            self._connect(self.coordinator.process)

    def start_shard(self, place: int) -> None:
        """Start a process on the disk of ``place``, if none uses it."""
        if self.disks[place].holder is None:
            number = place % self.plan.shards
            program = self.start_on(self.disks[place], number, self.name("shard", number))
            self.shards[place] = program
            program.process.at_end.append(lambda: self._shard_died(program, place))

    def start_on(self, disk: Disk, number: int, name: str) -> ShardProgram:
        """Start a process for shard ``number`` on ``disk``."""
        program = ShardProgram(self._kernel, name, number, disk, self._files, self.plan, self._shard_ended)
        self._subjects.shards[program.process] = program
        self._connect(program.process)
        return program

    def start_worker(self, rank: int | None) -> None:
        """Start a worker; it finishes the plan, or another is started in its place."""
        name = self.name("worker", rank if rank is not None else "any")
        host = self._root / f"host-{(self._names if rank is None else rank) // self.plan.per_host}-of-{self._jobs}"
        host.mkdir(exist_ok=True)
        program = WorkerProgram(self._kernel, name, rank, self.plan, host, self._worker_ended)
        self.workers.append(program)
        self._subjects.workers.add(program.process)
        self._connect(program.process)

    def _start_reader(self, number: int) -> None:
        """One reader in two has a cache. Those that ask a relay also ask the job now and then, with the same cache."""
        is_relayed = number < self.plan.relayed
        cache = None if number else self._root / f"reader-of-{0 if is_relayed else self._jobs}"
        whom = RELAY if is_relayed and self._random.random() < 0.8 else COORDINATOR
        name = self.name("reader", number)
        program = ReaderProgram(self._kernel, name, number, self.plan, whom, cache, self._judge, self._reader_ended)
        self.readers.append(program)
        self._connect(program.process)

    def _start_relay_in(self, seconds: float) -> None:
        """It is of no job: it outlives one that is replaced."""

        def start() -> None:
            if self.relay is None and not self._closed:
                self.relay = program = RelayProgram(self._kernel, self.plan, self._relay_ended)
                self._judge.relay_begins(program.process)
                self._connect(program.process)

        self._kernel.schedule(seconds, None, start)

    def command(self, name: str, action: Callable[[CoordinatorClient], object]) -> None:
        """What a person does with psctl, in a process of its own."""
        process = Process(self._kernel, self.name(name, "command"))
        self._connect(process)

        def run() -> None:
            with CoordinatorClient(COORDINATOR) as client:
                try:
                    action(client)
                except InternalError as error:
                    self._kernel.violate(f"{process} was answered with a defect: {error!r}")
                except PsError as error:
                    self._kernel.say(process, "was refused:", error)
            process.kill()

        self._kernel.schedule(0.0, process, lambda: Thread(target=run, name=name).start())

    def begin_job(self, folder: Path) -> None:
        """End all but a relay and who asks it; begin another job on empty disks, with the checkpoint in ``folder``."""
        self._jobs += 1
        shards, workers, coordinator = self.shards, self.workers, self.coordinator
        readers = [reader for reader in self.readers if reader.coordinator == COORDINATOR]
        self.readers = [reader for reader in self.readers if reader.coordinator == RELAY]
        self.shards, self.workers, self.coordinator = [None] * len(shards), [], None
        for program in (coordinator, *shards, *workers, *readers):
            if program is not None:
                program.process.kill()
        self._restored = self.disks[0].kept / f"{self._jobs}" / folder.name
        shutil.copytree(folder, self._restored)
        self._judge.begin_job(*beginning_of(self._restored))
        self._subjects.begin_job()
        self.disks[:] = [self._disk(self._root, f"shard-{at}-of-{self._jobs}") for at in range(len(shards))]
        self.coordinator_disk = Disk(self._root, f"coordinator-of-{self._jobs}")
        self._settings = replace(self._settings, job_id=f"job-{self._jobs}")
        self.to_finish, self.to_read = self.plan.workers, self.plan.readers
        self.begin()

    def _disk(self, root: Path, name: str) -> Disk:
        disk = Disk(root, name)
        disk.sync_seconds = self.plan.sync_seconds
        return disk

    def kill_worker(self, worker: WorkerProgram) -> None:
        """As ``kill -9``."""
        worker.process.kill()
        self._worker_gone(worker, "killed")

    def kill_reader(self, reader: ReaderProgram) -> None:
        """As ``kill -9``."""
        reader.process.kill()
        self._reader_ended(reader, "killed")

    def kill_relay(self) -> None:
        """As ``kill -9``."""
        if self.relay is not None:
            self.relay.process.kill()
            self._relay_ended("killed")

    def kill_coordinator(self, seconds: float) -> None:
        """As ``kill -9``; it is started again in ``seconds``."""
        if self.coordinator is not None:
            self.coordinator.process.kill()
            self._coordinator_died(seconds)

    def end(self) -> None:
        """End all, for good."""
        self._closed = True
        for process in self.alive:
            process.kill()
        self.shards, self.workers, self.readers, self.coordinator, self.relay = [], [], [], None, None

    def doing(self) -> str:
        """For the report of a job that does not end."""
        programs: list[WorkerProgram | ReaderProgram] = [*self.workers[:12], *self.readers]
        return "\n  ".join(program.doing() for program in programs)

    def name(self, role: str, number: object) -> str:
        """A new name for a process."""
        self._names += 1
        return f"{role}-{number}.{self._names}"

    @property
    def incarnations(self) -> list[int]:
        """The newest of each shard."""
        shards = self._subjects.shards.values()
        return [max((s.incarnation for s in shards if s.number == n), default=0) for n in range(self.plan.shards)]

    def _later(self, seconds: float, start: Callable[..., None], *arguments: object) -> None:
        """Start something of this job."""
        job = self._jobs
        self._kernel.schedule(seconds, None, lambda: start(*arguments) if job == self._jobs else None)

    # -- ends

    def _connect(self, process: Process) -> None:
        process.at_end.append(lambda: self.network.died(process))

    def _pause(self) -> float:
        """How long until a supervisor starts a process again."""
        longest = 1.0 if self.quiet else 8.0
        return 0.1 + self._random.random() * longest

    def _coordinator_ended(self, program: CoordinatorProgram, how: str) -> None:
        self._kernel.say("coordinator", how)
        self._coordinator_died(self._pause())

    def _coordinator_died(self, seconds: float) -> None:
        self.coordinator = None
        self._later(seconds, self.start_coordinator)

    def _shard_ended(self, program: ShardProgram, how: str) -> None:
        self._kernel.say(program.process, "ended:", how)

    def _shard_died(self, program: ShardProgram, place: int) -> None:
        if not self._closed and self.shards[place] is program:
            self.shards[place] = None
            self._later(self._pause(), self.start_shard, place)

    def _reader_ended(self, program: ReaderProgram, how: str) -> None:
        self._kernel.say(program.process, how)
        self.readers.remove(program)
        if how == "finished":
            self.to_read -= 1
        else:
            self._later(self._pause(), self._start_reader, program.number)

    def _relay_ended(self, how: str) -> None:
        self._kernel.say("relay", how)
        self.relay = None
        self._start_relay_in(self._pause())

    def _worker_ended(self, program: WorkerProgram, how: str) -> None:
        self._kernel.say(program.process, how)
        self._worker_gone(program, how)

    def _worker_gone(self, program: WorkerProgram, how: str) -> None:
        self.workers.remove(program)
        # Without a log a shard that dies before its first snapshot is whole has nothing, and the job says so and ends.
        # So does a standby that takes over before it has the initial values, where they were acknowledged before.
        self.lost = self.lost or (how.startswith("lost") and not self.plan.keeps_acknowledged)
        unwanted = how.startswith("place taken") and program.rank is None
        if how == "finished" and program.process in self._subjects.unheard:
            self._kernel.violate(f"{program.process} has finished, and the coordinator has not heard of it")
        # The others wait for one of which the coordinator has not heard that it has finished: it is started again.
        finished = how == "finished" and program.process in self._subjects.left
        if finished or self._judge.coordinator.finished or unwanted:
            # Once the job is finished, a worker that joins would be the first of a new run, and wait for the others.
            self.to_finish -= 1
        elif not program.replaced:
            self._later(self._pause(), self.start_worker, program.rank)
