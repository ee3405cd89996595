"""Workers of one host push together, and one is lost at each point: every push counts once on each shard."""

from __future__ import annotations

import itertools
import json
import signal

import pytest
import torch

from ps_protocol.cluster.view import Role
from tests.recovery.cluster import Cluster, Worker
from tests.recovery.reference import replayed
from tests.support.length import choose
from tests.support.shards import wait_until

WEIGHTS = (1.0, 2.0, 4.0)
"""By tag. What a push adds to the ledger tells which workers it was made for, and that it was applied once."""

LEADER = ("gathered", "summed", "answered", "told")
FOLLOWER = ("deposited", "before_copy", "after_copy")
CASES = list(itertools.product(LEADER + FOLLOWER, ("kill", "stop"), ("async", "sync"), (False, True)))
"""Where, what, the mode, and whether there are rows."""
SHORT = [("summed", "kill", "async", True), ("before_copy", "stop", "sync", False)]


def adds(tag: int) -> set[float]:
    """What one push with the gradients of ``tag`` may add to its entry: alone, or in a mean with those of others."""
    others = [weight for other, weight in enumerate(WEIGHTS) if other != tag]
    groups = [group for size in range(len(others) + 1) for group in itertools.combinations(others, size)]
    return {WEIGHTS[tag] / (WEIGHTS[tag] + sum(group)) for group in groups}


def is_once(value: float, tag: int) -> bool:
    return any(abs(value - one) < 1e-5 for one in adds(tag))


def assert_each_push_counts_once(line: str, workers: list[Worker]) -> None:
    """On each shard: every acknowledged push once; one that was under way when its worker died once, or not at all."""
    for counts in torch.tensor(json.loads(line.removeprefix("ledger "))):
        for tag, worker in enumerate(workers):
            row, steps = counts[tag].tolist(), worker.steps
            told = f"worker of tag {tag}, acknowledged {steps}: {row}"
            assert all(is_once(value, tag) for value in row[:steps]), told
            assert row[steps] == 0.0 or is_once(row[steps], tag), told
            assert not any(row[steps + 1 :]), told


def started(cluster: Cluster, armed: dict[int, str], steps: int = 40, *, rows: bool = False) -> list[Worker]:
    """Three workers of one host, that of tag 0 leads; all go on from here on."""
    workers = []
    for tag, weight in enumerate(WEIGHTS):
        inside = {"PS_PER_HOST": "1"} | ({"TESTS_ON_HOST": armed[tag]} if tag in armed else {})
        pauses = [1] if tag == 0 else []
        workers.append(
            cluster.worker(
                tag,
                inside=inside,
                tag=tag,
                weight=weight,
                steps=steps,
                pauses=pauses,
                stays=tag != 0,
                row_ledger=rows,
            )
        )
        workers[-1].read("step 1" if tag == 0 else "started")
    workers[0].tell()
    return workers


def ends(cluster: Cluster, workers: list[Worker], broken: int) -> None:
    """The others train to their end, and what is served is what the logs hold."""
    rest = [worker for tag, worker in enumerate(workers) if tag != broken]
    for worker in rest:
        worker.read("stays" if worker is not workers[0] else "step 40")
    workers[broken].kill()
    workers[broken].drain()
    ledger = ""
    for worker in rest:
        if worker is not workers[0]:
            worker.tell()
        digest = worker.read("digest").split()[1]
        ledger = worker.read("ledger")
        assert worker.wait() == 0, worker.said
    assert_each_push_counts_once(ledger, workers)
    assert replayed(cluster.data, len(cluster.shards))["model"] == digest


@pytest.mark.parametrize(("point", "action", "mode", "rows"), choose(CASES, SHORT))
@pytest.mark.early
def test_each_push_counts_once_whoever_of_a_host_is_lost_and_where(launch, point, action, mode, rows):
    cluster = launch(2, coordinator=["--mode", mode])
    broken = 0 if point in LEADER else 1
    workers = started(cluster, {broken: f"{point}={action}@30"}, rows=rows)
    if action == "stop":
        wait_until(lambda: workers[broken].process.stopped)
        # Not until the others are the only members: they come to their end.
        wait_until(lambda: broken not in cluster.status().view.live(Role.WORKER))
        workers[broken].process.send(signal.SIGCONT)
    ends(cluster, workers, broken)
