"""A job in this process whose slices move between fake shards."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from ps_protocol.cluster.view import JoinRequest, MoveProgress, Role
from ps_protocol.model.spec import DType, ModelSpec, Variable
from ps_server.cli.options.checkpoint import CheckpointConfig
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.jobs.checkpoints import Checkpoints
from ps_server.coordinator.jobs.move_runner import MoveRunner
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


J = TypeVar("J", bound=Job)


def played(body: Callable[[Job], Coroutine[Any, Any, None]], journal: Journal | None = None) -> None:
    played_in(lambda: Job(journal), body)


def played_in(make: Callable[[], J], body: Callable[[J], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        job = make()
        try:
            await job.start()
            await asyncio.wait_for(body(job), 60)
        finally:
            await job.moves.stop()
            for shard in job.shards:
                await shard.stop()
            await job.driver.close()

    asyncio.run(run())
