"""A variable that moves belongs to the model that was named, not to another one of its name. No process, 0.1 s."""

from contextlib import aclosing

import pytest

from ps_protocol.cluster.view import ClosedModelAsk, Role
from ps_protocol.errors import ModelReleased
from ps_server.coordinator.jobs.release_runner import ReleaseRunner
from ps_server.coordinator.placement.move_plan import MoveRequest
from tests.coordinator.moving_job import SPEC, Job, played


@pytest.mark.parametrize("declared_again", [False, True])
def test_a_model_that_is_released_behind_its_last_batch_ends_the_move(declared_again: bool) -> None:
    async def body(job: Job) -> None:
        worker = job.driver.view.live(Role.WORKER)[0]
        releases = ReleaseRunner(job.driver, job.checkpoints.busy)
        (held,) = [piece.shard for piece in job.driver.shard_map("net").slices if piece.variable == 0]
        batches = 0

        async def released_behind_the_batch() -> None:
            nonlocal batches
            async with aclosing(job.moves.reshard(MoveRequest((1 - held,), (), "net", "v0"))) as made:
                async for progress in made:
                    if progress.batches:
                        batches += 1
                        ask = ClosedModelAsk("net", 1, release=True)
                        await releases.close(worker.index, worker.incarnation, ask, 5.0)
                        if declared_again:
                            job.declare(SPEC)

        with pytest.raises(ModelReleased, match="model 'net' was released meanwhile"):
            await released_behind_the_batch()
        assert batches == 1
        assert job.driver.view.released_models == {"net": 2}
        assert job.driver.view.models == ({"net": 3} if declared_again else {})

    played(body)
