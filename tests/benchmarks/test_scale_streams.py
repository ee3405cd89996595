"""The streams of the scale program open, make steps and end. In this process; under 1 s of CPU."""

import pytest

from benchmarks.scale.streams import MODEL, declare, streams
from ps_protocol.cluster.view import Role
from ps_protocol.model.spec import Consistency, Mode
from tests.support.shards import wait_until
from tests.worker.jobs import running_job

ASYNC = Consistency(Mode.ASYNC)
COUNT, NBYTES = 4, 1024


def test_streams_step_when_told_and_their_pushes_count():
    with running_job(workers=0, consistency=ASYNC, lease_seconds=600) as job:
        shard, epoch = declare(job.address, NBYTES)
        assert (shard, epoch) == (job.client.get_status().view.live(Role.SHARD)[0].address, 1)
        with streams((job.address, shard), epoch, COUNT, 1, NBYTES) as made:
            wait_until(lambda: made.opened() == COUNT)
            assert made.steps() == 0
            made.step_every(0.02)
            wait_until(lambda: made.steps() >= 5 * COUNT)
            assert job.client.get_shard_map(MODEL).epoch == epoch


def test_a_stream_that_fails_is_told():
    with running_job(workers=0, consistency=ASYNC, lease_seconds=600) as job:
        shard, epoch = declare(job.address, NBYTES)
        with streams((job.address, shard), epoch, 1, 1, NBYTES * 2) as made:
            wait_until(lambda: made.opened() == 1)
            made.step_every(0.02)
            with pytest.raises(RuntimeError, match="worker 1"):
                wait_until(lambda: made.steps() < 0)
