"""A job in this process whose slices move between fake shards."""

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from functools import wraps
from typing import Any

import pytest

from ps_protocol.cluster.view import JoinRequest, MoveProgress, Role
from ps_protocol.model.spec import DType, ModelSpec, Variable
from ps_server.cli.options.checkpoint import CheckpointConfig
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.jobs.checkpoints import Checkpoints
from ps_server.coordinator.jobs.move_runner import MoveRunner
from ps_server.coordinator.jobs.quiesce import ShardControl
from ps_server.coordinator.persistence.journal import Journal
from ps_server.coordinator.placement.move_plan import MoveRequest
from ps_server.coordinator.settings import ClusterSettings
from tests.coordinator.cluster import declare
from tests.coordinator.fake_shards import FakeShard

ROWS = 256
SPEC = ModelSpec(
    "net", "torch.optim.SGD", tuple(Variable(f"v{i}", (ROWS,), DType.FLOAT32) for i in range(8)), ({"lr": 0.1},)
)
SLICE_BYTES = 4 * ROWS


class Job:
    """Two shards with a model of eight slices, and a third that was added."""

    def __init__(self, journal: Journal | None = None) -> None:
        self.driver = Driver(ClusterSettings(expected_shards=2, lease_seconds=600), journal=journal)
        self.checkpoints = Checkpoints(self.driver, CheckpointConfig())
        self.moves = MoveRunner(self.driver, self.checkpoints.busy)
        self.shards = [FakeShard(number, self.driver) for number in range(3)]

    async def start(self) -> None:
        for shard in self.shards:
            await shard.start(add=True)
        self.driver.join(JoinRequest(Role.WORKER, 0, "", "worker"))
        self.declare(SPEC)

    def declare(self, spec: ModelSpec) -> None:
        worker = self.driver.view.live(Role.WORKER)[0]
        declare(self.driver, worker, spec)

    async def reshard(self, wish: MoveRequest, batch_bytes: int = 0) -> list[MoveProgress]:
        async with aclosing(self.moves.reshard(wish, batch_bytes)) as made:
            return [progress async for progress in made]

    @property
    def held(self) -> list[int]:
        """Slices by shard."""
        slices = self.driver.shard_map("net").slices
        return [sum(s.shard == shard.number for s in slices) for shard in self.shards]

    def check_all_go_on(self) -> None:
        """No shard holds still, and all serve by the map in force."""
        view = self.driver.view
        assert view.moving == ""
        for shard in self.shards:
            assert shard.is_open
            assert shard.epochs == view.models


def played(
    body: Callable[..., Coroutine[Any, Any, None]],
    journal: Journal | None = None,
    kind: type[Job] = Job,
    **fixtures: Any,
) -> None:
    """Run ``body`` with a job of its own."""

    async def run() -> None:
        job = kind(journal)
        try:
            await job.start()
            with pytest.MonkeyPatch.context() as patient:
                # A real shard goes on by itself when no call tells it to; these are told, however late this loop is.
                patient.setattr(ShardControl.resume, "__defaults__", (60.0, 0))
                await asyncio.wait_for(body(job, **fixtures), 60)
        finally:
            await job.moves.stop()
            for shard in job.shards:
                await shard.stop()
            await job.driver.close()

    asyncio.run(run())


def on_job(test: Callable[..., Coroutine[Any, Any, None]], kind: type[Job] = Job) -> Callable[..., None]:
    """Make ``test``, which takes a job and then fixtures, a test that takes the fixtures."""

    @wraps(test)
    def run(**fixtures: Any) -> None:
        played(test, kind=kind, **fixtures)

    signature = inspect.signature(test)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # type: ignore[attr-defined]
    return run
