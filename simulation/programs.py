"""What runs in the simulated processes: ps-coordinator, ps-server and a training script, as users start them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ps_protocol.client.coordinator import LINEAGE_VARIABLE
from ps_protocol.errors import (
    Fenced,
    NotReady,
    PlaceTaken,
    PsError,
    StateLost,
    StorageFull,
    Unavailable,
    UnknownVersion,
    VersionGone,
)
from ps_protocol.times import PATIENCE_SECONDS
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.cli.options.checkpoint import CheckpointConfig
from ps_server.cli.options.storage import Durability, SnapshotRule, StorageConfig
from ps_server.coordinator import main as coordinator
from ps_server.coordinator.config import CoordinatorConfig
from ps_server.coordinator.persistence.journal import Journal
from ps_server.coordinator.settings import ClusterSettings
from ps_server.failpoints import Failpoints
from ps_server.relay import process as relay
from ps_server.shard import process as shard
from ps_server.shard.config import Acknowledge, ShardConfig, SideChannelConfig
from ps_worker import Cluster
from ps_worker.optimizer import PsOptimizer
from ps_worker.rows import SGD, Constant
from ps_worker.session.config import PerHost, WorkerConfig
from ps_worker.session.session import Session
from ps_worker.weights import Subscription, Version, subscribe
from simulation.judge import Judge
from simulation.plan import Plan
from simulation.runtime.disk import WRITE_POINTS, Disk, Files
from simulation.runtime.kernel import Kernel, Killed, Process
from simulation.runtime.substitutes import PORT
from simulation.runtime.threads import Thread
from simulation.runtime.wait import sleep

COORDINATOR = f"coordinator:{PORT}"

RELAY = f"relay:{PORT}"

GRADIENT_UNIT = 2520.0
"""A mean of up to ten gradients that are multiples of it is exact."""

ROW_GRADIENT_UNIT = 60.0
"""The same for rows, whose numbers are float32."""

ROW_IDS = 30

FIRST_VALUE = 77.0

PUBLISHED = "weights"
"""The name under which a worker publishes."""

#: Told how a process ended.
Ended = Callable[[Any, str], None]


class Program:
    """One process from its start to its end."""

    def __init__(self, kernel: Kernel, name: str, environment: dict[str, str] | None = None) -> None:
        self.kernel = kernel
        self.process = Process(kernel, name, environment)

    def _run(self, main: Coroutine[Any, Any, None], ended: Callable[[BaseException | None], None]) -> None:
        def begin() -> None:
            task = self.kernel.create_task(main, name=self.process.name)
            task.add_done_callback(over)

        def over(task: asyncio.Task[None]) -> None:
            error = task.exception()
            if not isinstance(error, Killed):
                ended(error)
                self.process.kill()

        self.kernel.schedule(0.0, self.process, begin)


class CoordinatorProgram(Program):
    """ps-coordinator on ``disk``."""

    POINTS = ("before_write", "after_write")

    def __init__(
        self,
        kernel: Kernel,
        name: str,
        disk: Disk,
        settings: ClusterSettings,
        checkpoints: CheckpointConfig,
        restored: Path | None,
        on_end: Ended,
    ) -> None:
        """``restored``: the checkpoint of --restore."""
        super().__init__(kernel, name)
        self._disk = disk
        self._settings = settings
        self._checkpoints = checkpoints
        self._restored = restored
        self.journal: Journal | None = None
        self._armed: dict[str, int] = {}
        self.process.at_end.append(self._died)
        self._on_end = on_end
        self._run(self._main(), self._over)

    async def _main(self) -> None:
        journal = self.journal = Journal.open(self._disk.path)
        write = journal.write

        def guarded(rows: Mapping[str, bytes | None]) -> None:
            if self._disk.full:
                raise Unavailable("the coordinator cannot write its journal: its disk is full")
            self._pass("before_write")
            write(rows)
            self._pass("after_write")

        journal.write = guarded  # type: ignore[method-assign]
        saved = Checkpoint.open(self._restored) if self._restored else None
        config = CoordinatorConfig("coordinator", PORT, None, self._settings, self._checkpoints, saved)
        await coordinator.serve(config, self.journal, asyncio.Event())

    def arm(self, point: str, count: int) -> None:
        """Have the process die when it passes ``point`` for the ``count``-th time."""
        self._armed[point] = count

    def disarm(self) -> None:
        """Pass all points unharmed."""
        self._armed.clear()

    def _pass(self, point: str) -> None:
        if point in self._armed:
            self._armed[point] -= 1
            if self._armed[point] <= 0:
                self.process.kill()
                self._on_end(self, f"dies {point}")
                raise Killed

    def _died(self) -> None:
        self._disk.renew()
        if self.journal:
            self.journal._connection.close()

    def _over(self, error: BaseException | None) -> None:
        if not isinstance(error, Unavailable):
            self.kernel.violate(f"the coordinator ended with {error!r}")
        self._on_end(self, "cannot write its journal")


class ShardProgram(Program):
    """ps-server for shard ``number`` on ``disk``."""

    POINTS = ("before_log", "after_log_before_apply", "after_apply_before_reply", *WRITE_POINTS)

    def __init__(
        self, kernel: Kernel, name: str, number: int, disk: Disk, files: Files, plan: Plan, on_end: Ended
    ) -> None:
        super().__init__(kernel, name, {LINEAGE_VARIABLE: disk.name})
        self.number = number
        self.incarnation = 0
        self.disk = disk
        self._files = files
        self._failpoints = Failpoints()
        self._on_end = on_end
        disk.attach(self.process)
        files.disks[self.process] = disk
        self.process.at_end.append(self._died)
        durability = Durability.DURABLE if plan.durable else Durability.SNAPSHOT
        rule = SnapshotRule(plan.snapshot_seconds or 1e9, log_bytes=plan.log_bytes, strict=True)
        config = ShardConfig(
            shard=number,
            coordinator=COORDINATOR,
            bind=name,
            port=PORT,
            threads=1,
            side_channels=SideChannelConfig(ports=(), shm=False),
            storage=StorageConfig(durability, disk.path, plan.fsync, rule, int(plan.rows_on_disk)),
            failpoints=self._failpoints,
            checkpoint_dirs=(disk.shared, disk.kept) if plan.has_checkpoints else (),
            standby=plan.standby,
            acknowledge=Acknowledge.AFTER if plan.standby and plan.acknowledged_after else Acknowledge.BEFORE,
            stuck_seconds=0.0,
        )
        self._run(shard.serve(config, asyncio.Event()), self._over)

    def _died(self) -> None:
        del self._files.disks[self.process]
        self._files.armed.pop(self.process, None)

    def arm(self, point: str, count: int) -> None:
        """Have the process die when it passes ``point`` for the ``count``-th time."""
        if point in WRITE_POINTS:
            self._files.armed.setdefault(self.process, {})[point] = count
            return
        left = count

        def action() -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                self.process.kill()
                raise Killed

        self._failpoints.arm(point, action)

    def disarm(self) -> None:
        """Pass all points unharmed."""
        self._files.armed.pop(self.process, None)
        for point in ("before_log", "after_log_before_apply", "after_apply_before_reply"):
            self._failpoints.disarm(point)

    def _over(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, Fenced | Unavailable | StorageFull):
            self.kernel.violate(f"{self.process} ended with {error!r}")
        self._on_end(self, repr(error))


class WorkerProgram(Program):
    """A training script: steps, barriers, and every gradient of a step the same number."""

    def __init__(self, kernel: Kernel, name: str, rank: int | None, plan: Plan, host: Path, on_end: Ended) -> None:
        """``host``: a folder that the workers of its host see."""
        super().__init__(kernel, name, {LINEAGE_VARIABLE: f"worker {rank}", "TMPDIR": str(host)})
        self.rank = rank
        #: Another process was started in its place; nobody starts this one again.
        self.replaced = False
        self.steps_made = 0
        self._table: torch.nn.Module | None = None
        self._plan = plan
        self._on_end = on_end
        kernel.schedule(0.0, self.process, self._begin)

    def doing(self) -> str:
        """For the report of a job that does not end."""
        return f"{self.process} after {self.steps_made} steps"

    def _begin(self) -> None:
        Thread(target=self._main, name="main").start()

    def _main(self) -> None:
        how = "finished"
        try:
            self._train()
        except Fenced as error:
            how = f"fenced: {error.message}"
        except StateLost as error:
            if self._plan.keeps_acknowledged:
                self.kernel.violate(f"{self.process} was told that durable state is lost: {error.message}")
            how = f"lost: {error.message}"
        except Unavailable as error:
            how = f"gave up: {error.message}"
        except PlaceTaken as error:
            how = f"place taken: {error.message}"
        except PsError as error:
            self.kernel.violate(f"{self.process}, which kept to the rules, was refused: {error!r}")
        if self.process.alive:
            self._on_end(self, how)
            self.process.kill()

    def _train(self) -> None:
        plan = self._plan
        per_host: PerHost = "sync" if plan.per_host_in_sync else plan.per_host > 1
        config = WorkerConfig(COORDINATOR, rank=self.rank, device="cpu", transport="grpc", per_host=per_host)
        with Cluster(Session.join(config)) as cluster:
            table = cluster.embedding(2, name="rows", optimizer=SGD(lr=1.0), init=Constant(0.0))
            self._table = table if plan.has_table else None
            short = plan.has_releases
            optimizers = [self._optimizer(cluster) for _ in range(1 if short else plan.models)]
            loader = None
            if plan.data_items:
                loader = cluster.shard(DataLoader(_Items(plan.data_items), batch_size=1), lease=True)
            phase = cluster._session.phase
            while phase < plan.phases:
                # The name is used again in the phase after the next one.
                of_phase = [self._optimizer(cluster, f"model-{1 + phase % 2}")] if short else []
                for _ in loader if loader is not None else range(plan.steps):
                    self._step([*optimizers, *of_phase])
                    if plan.readers and cluster.rank == 0 and self.steps_made % plan.publish_steps == 0:
                        self._publish(cluster, optimizers[0])
                phase += 1
                if phase < plan.phases:
                    self._end_phase(cluster, of_phase)
            # A version without a server that was lost is missing: no script has to fail of that here.
            with suppress(Unavailable, NotReady, StorageFull):
                cluster._publishing.finish()

    def _publish(self, cluster: Cluster, optimizer: PsOptimizer) -> None:
        """Training goes on also where no version is made."""
        plan, step = self._plan, 1000 * self.process.number + self.steps_made
        try:
            cluster.publish(PUBLISHED, optimizer, step=step, keep=plan.keep_versions, wait=plan.publish_waits)
        except (NotReady, StorageFull) as error:
            if self.kernel.now > plan.quiet_at + PATIENCE_SECONDS:
                self.kernel.violate(f"{self.process} could not publish, and nothing was wrong any more: {error!r}")
            self.kernel.say(self.process, "publishes nothing:", error)

    def _end_phase(self, cluster: Cluster, of_phase: Iterable[PsOptimizer]) -> None:
        """Wait for the other workers; what only this phase had is released."""
        for optimizer in of_phase:
            while True:
                # Another worker has not closed it yet; the barrier is passed.
                with suppress(NotReady):
                    optimizer.close(release=True)
                    return
        cluster.barrier()

    def _optimizer(self, cluster: Cluster, name: str | None = None) -> PsOptimizer:
        plan = self._plan
        model: torch.nn.Module = torch.nn.ParameterList(
            torch.full((rows, 4), FIRST_VALUE, dtype=torch.float64) for rows in plan.rows
        )
        if self._table is not None:
            model = torch.nn.ModuleList([model, self._table])
        return cluster.optimizer(
            torch.optim.SGD,
            model,
            lr=1.0,
            momentum=plan.momentum,
            name=name,
            nonfinite="skip",
            overlap=plan.overlap,
            wire=plan.wire,
            stale=plan.stale,
        )

    def _step(self, optimizers: Iterable[PsOptimizer]) -> None:
        plan, random = self._plan, self.kernel.random
        sleep(plan.think_seconds * random.expovariate(1.0))
        for optimizer in optimizers:
            gradient = GRADIENT_UNIT * random.randrange(1, 1 << 20)
            shown = float("nan") if random.random() < plan.skipped else gradient
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                parameter.grad = torch.full_like(parameter, shown)
            if self._table is not None:
                ids = torch.tensor(random.sample(range(ROW_IDS), 3))
                (self._table(ids) * (ROW_GRADIENT_UNIT * random.randrange(1, 5))).sum().backward()
            optimizer.step()
        self.steps_made += 1


class RelayProgram(Program):
    """psctl weights relay."""

    def __init__(self, kernel: Kernel, plan: Plan, on_end: Callable[[str], None]) -> None:
        super().__init__(kernel, "relay")
        self._on_end = on_end
        config = relay.RelayConfig(
            coordinator=COORDINATOR,
            names=(PUBLISHED,) if plan.relay_is_told_the_name else (),
            keep=plan.relay_keeps,
            bind="relay",
            port=PORT,
            side_channels=SideChannelConfig(ports=(), shm=False),
        )
        received, say = partial(kernel.say, self.process, "has"), partial(kernel.say, self.process)
        self._run(
            relay.serve(config, asyncio.Event(), lambda name, version, _: received(name, version.number), say),
            self._over,
        )

    def _over(self, error: BaseException | None) -> None:
        if error is not None:
            self.kernel.violate(f"{self.process}, which only reads, ended with {error!r}")
        self._on_end("finished")


class ReaderProgram(Program):
    """A process that follows what a worker publishes to the end of the job, and now and then reads an older version."""

    def __init__(
        self,
        kernel: Kernel,
        name: str,
        number: int,
        plan: Plan,
        coordinator: str,
        cache: Path | None,
        judge: Judge,
        on_end: Callable[[ReaderProgram, str], None],
    ) -> None:
        super().__init__(kernel, name, {"PS_TRANSPORT": "grpc"})
        self.number = number
        self.coordinator = coordinator
        #: The number of a job, and of the version of it that it has; 0: none.
        self.has = 0, 0
        self._think_seconds = plan.think_seconds
        self._dtype = torch.float32 if plan.converts and number else None
        self._cache = cache
        self._judge = judge
        self._on_end = on_end
        kernel.schedule(0.0, self.process, lambda: Thread(target=self._main, name="main").start())

    def doing(self) -> str:
        """For the report of a job that does not end."""
        return f"{self.process} with version {self.has[1]} of job {self.has[0]}"

    def _main(self) -> None:
        how = "finished"
        try:
            self._follow()
            if self._is_of_earlier_job:
                how = "has followed an earlier job to its end"
        except Unavailable as error:
            how = f"gave up: {error.message}"
        except PsError as error:
            if not isinstance(error, UnknownVersion) or not self._is_of_earlier_job:
                self.kernel.violate(f"{self.process}, which only reads, was refused: {error!r}")
            how = f"has what is of an earlier job: {error.message}"
        if self.process.alive:
            self._on_end(self, how)
            self.process.kill()

    @property
    def _is_of_earlier_job(self) -> bool:
        job, number = self.has
        return number > 0 and job < self._judge.published.job

    def _follow(self) -> None:
        random = self.kernel.random
        with subscribe(PUBLISHED, coordinator=self.coordinator, dtype=self._dtype, cache=self._cache) as versions:
            for version in versions:
                before = self.has
                self._hold(version)
                if self.has <= before:
                    self.kernel.fail(
                        f"{self.process} is given {version!r}, of job and number {self.has} after {before}"
                    )
                sleep(self._think_seconds * random.expovariate(1.0))
                has = self.has[1]
                if has > 1 and random.random() < 0.3:
                    self._look_back(versions, random.randrange(max(1, has - 3), has))
        self._judge.reader_ended(self.process.name, *self.has)

    def _look_back(self, versions: Subscription, number: int) -> None:
        try:
            self._hold(versions.fetch(number))
        except VersionGone:
            if self.coordinator == COORDINATOR:
                self._judge.published.gone(self.process.name, number)

    def _hold(self, version: Version) -> None:
        published = self._judge.published_of(version._whole.job_id)
        self.has = published.job, version.number
        self.kernel.say(self.process, "has", version)
        tensors = version.tensors()
        values = {name: (each.numpy().tobytes(), each.tolist()) for name, each in tensors.items()}
        dtype = "float64" if self._dtype is None else "float32"
        published.read(self.process.name, version.number, version.step, dtype, values)


class _Items(Dataset[int]):
    """The numbers of items."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> int:
        return number
