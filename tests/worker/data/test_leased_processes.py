"""Leases over real processes: a worker killed or told to end, a coordinator that restarts, a job that starts again."""

from __future__ import annotations

import itertools
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.client.membership import Membership
from ps_protocol.cluster.view import JoinRequest, Role
from ps_server.coordinator.settings import ClusterSettings
from ps_worker.data.leased_loader import lease_items
from tests.support.coordinators import TestCoordinator, stopped_coordinator
from tests.support.interpreters import Interpreter

ITEMS = 200

WORKER = f"""
import select
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import ps_worker
from ps_worker.data import leased_loader

leased_loader.BRIEF_CALL_SECONDS = 20.0
address, epochs, stop_after = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with ps_worker.connect(address, device="cpu") as cluster:
    loader = cluster.shard(DataLoader(TensorDataset(torch.arange({ITEMS})), batch_size=4, shuffle=True))
    for epoch in range(epochs):
        for number, (batch,) in enumerate(loader):
            if number == stop_after:
                print("stopped", flush=True)
                while not select.select([sys.stdin], [], [], 0.1)[0]:
                    pass
                sys.stdin.readline()
            print(epoch, *batch.tolist(), flush=True)
"""
"""Prints each batch when it is trained. After ``stop_after`` batches of an epoch it holds the next one untrained.

Python sees a signal that comes just before a call that blocks only after the call: so none blocks for long.
"""

SETTINGS = ClusterSettings(heartbeat_seconds=0.1, seed=5)


class Worker:
    """A training script in a process of its own."""

    def __init__(self, script: str, *arguments: str) -> None:
        self.process = Interpreter("-c", script, *arguments, PS_TERMINATION_SECONDS="60")
        self.lines: list[str] = []

    def run_until(self, word: str) -> None:
        for line in self.process.stdout:
            if line != "stopped\n":
                self.lines.append(line)
            if line.startswith(word):
                return
        raise AssertionError(f"ended with {self.process.wait()} before '{word}'; {self.lines}")

    def go_on(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> int:
        """Read the rest; the exit code."""
        self.lines += self.process.stdout
        return self.process.wait()

    def items(self, epoch: int = 0) -> list[int]:
        rows = [[int(word) for word in line.split()] for line in self.lines]
        return [item for row in rows if row[0] == epoch for item in row[1:]]

    def close(self) -> None:
        self.process.close()


class Cluster:
    """A coordinator with a journal, the place of its one shard taken, and the workers a test started.

    These run ``script`` with the coordinator's address, ``arguments``, epochs, and the number of batches to stop after.
    """

    def __init__(self, coordinator: TestCoordinator, exits: ExitStack, script: str, *arguments: str) -> None:
        self.coordinator = coordinator
        self._exits = exits
        self._script, self._arguments = script, arguments

    def worker(self, epochs: int = 1, stop_after: int = -1) -> Worker:
        worker = Worker(self._script, self.coordinator.address, *self._arguments, str(epochs), str(stop_after))
        self._exits.callback(worker.close)
        return worker


@contextmanager
def running(data_dir: Path, script: str = WORKER, *arguments: str) -> Iterator[Cluster]:
    with stopped_coordinator(SETTINGS, data_dir) as coordinator, ExitStack() as exits:
        coordinator.start()
        client = exits.enter_context(CoordinatorClient(coordinator.address))
        exits.enter_context(Membership.join(client, JoinRequest(Role.SHARD, 0, "127.0.0.1:1")))
        yield Cluster(coordinator, exits, script, *arguments)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running(tmp_path) as cluster:
        yield cluster


def counted(*workers: Worker, epoch: int = 0) -> Counter[int]:
    return Counter(itertools.chain(*(worker.items(epoch) for worker in workers)))


def test_the_rest_of_a_killed_worker_is_trained_by_others_and_the_epoch_ends(cluster: Cluster) -> None:
    killed = cluster.worker(stop_after=5)
    killed.run_until("stopped")
    other = cluster.worker()
    other.run_until("0")
    killed.process.kill()
    assert killed.end() == -signal.SIGKILL
    assert other.end() == 0
    times = counted(killed, other)
    assert set(times) == set(range(ITEMS))
    # What the killed one had not reported is trained again: a lease at most.
    assert set(times.values()) <= {1, 2}
    assert sum(times.values()) - ITEMS <= lease_items(ITEMS, 4, 1)


def test_sigterm_reports_what_was_trained_and_returns_the_rest(cluster: Cluster) -> None:
    told = cluster.worker(stop_after=5)
    told.run_until("stopped")
    told.process.terminate()
    assert told.end() == 128 + signal.SIGTERM
    other = cluster.worker()
    assert other.end() == 0
    assert counted(told, other) == Counter(range(ITEMS))


def test_a_coordinator_that_restarts_from_its_journal_in_the_middle_loses_and_repeats_nothing(cluster: Cluster) -> None:
    workers = [cluster.worker(epochs=2, stop_after=2) for _ in range(2)]
    for worker in workers:
        worker.run_until("stopped")
    cluster.coordinator.stop()
    for worker in workers:
        worker.go_on()
    cluster.coordinator.start()
    for worker in workers:
        worker.run_until("stopped")
        worker.go_on()
    assert [worker.end() for worker in workers] == [0, 0]
    for epoch in range(2):
        assert counted(*workers, epoch=epoch) == Counter(range(ITEMS))


def test_a_job_that_starts_again_goes_on_in_the_middle_of_the_epoch_it_was_in(tmp_path: Path) -> None:
    with running(tmp_path) as cluster:
        whole = cluster.worker(epochs=1)
        assert whole.end() == 0
        told = cluster.worker(epochs=3, stop_after=7)
        told.run_until("stopped")
        told.process.terminate()
        told.end()
    with running(tmp_path) as cluster:
        again = cluster.worker(epochs=3)
        assert again.end() == 0
        assert again.items(0) == []
        assert counted(told, again, epoch=1) == Counter(range(ITEMS))
        assert counted(again, epoch=2) == Counter(range(ITEMS))
