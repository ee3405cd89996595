"""What a standby lacks, in records and in seconds. One shard and one follower in this process: about a second."""

from __future__ import annotations

import threading

from tests.shard.standby.support import follower, primary
from tests.shard.test_metrics import read
from tests.support.shards import StubStream, flat, gradients, start, wait_until


def test_a_standby_that_stops_writing_lags_by_what_it_lacks_until_it_goes_on(tmp_path):
    held = threading.Event()
    with primary(tmp_path / "a") as shard, follower(tmp_path / "b") as following:
        model, _ = start(shard)
        found = read(shard, shard.feed)
        assert found["standby_connected",] == 0
        assert ("standby_lag_records",) not in found
        assert ("standby_lag_seconds",) not in found
        following.begin(shard)
        following.reach(shard)
        wait_until(lambda: read(shard, shard.feed)["standby_lag_records",] == 0)
        found = read(shard, shard.feed)
        assert (found["standby_connected",], found["standby_lag_seconds",]) == (1, 0)

        async def block() -> None:
            following.follower._executor.submit(lambda: held.wait(60), 1 << 62)

        following.loop.run(block())
        try:
            stream = StubStream(shard)
            for step in range(3):
                stream.exchange(flat(model.layout, *gradients(model, step)))
            assert read(shard, shard.feed)["standby_lag_records",] == 3
            wait_until(lambda: read(shard, shard.feed)["standby_lag_seconds",] > 0.3)
        finally:
            held.set()
        wait_until(lambda: read(shard, shard.feed)["standby_lag_records",] == 0)
        assert read(shard, shard.feed)["standby_lag_seconds",] == 0
        stream.end()
