"""Workers join and leave a running job in every mode, in good order and as a crash."""

from __future__ import annotations

import pytest

from tests.recovery.reference import assert_each_push_was_applied_once, assert_served_is_replayed
from tests.support.length import few

MODES = {"async": ["--mode", "async"], "ssp": ["--mode", "ssp", "--staleness", "2"], "sync": ["--mode", "sync"]}


@pytest.mark.parametrize("mode", few(reversed(MODES), 2))
def test_workers_come_and_go_while_one_trains_on(launch, mode):
    cluster = launch(2, coordinator=MODES[mode])
    stays = cluster.worker(tag=0, stays=True, pauses=[5, 20], steps=40)
    stays.read("step 5")
    leaves = cluster.worker(1, tag=1, steps=6)
    assert leaves.number("started") >= 5
    stays.tell()
    leaves.read("ledger")
    assert leaves.wait() == 0
    stays.read("step 20")
    crashes = cluster.worker(1, tag=2, dies_after=6)
    assert crashes.number("started") >= 20
    stays.tell()
    assert crashes.drain() == 7
    stays.read("stays")
    counts = assert_served_is_replayed(cluster, stays)
    if mode == "sync":
        assert counts.sum() == counts[0].count_nonzero() == 40
        assert counts[1].tolist()[:7] == counts[2].tolist()[:7] == [*[0.5] * 6, 0.0]
    else:
        assert_each_push_was_applied_once(counts, [stays, leaves, crashes])
