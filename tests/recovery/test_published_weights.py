"""Readers of published weights while shards and the coordinator are killed: each version they see is whole."""

from __future__ import annotations

import threading
import time

import torch

import ps_worker
from tests.support.length import choose
from tests.support.seeds import seeded
from tests.support.shards import wait_until

READERS, KILLS = choose((8, 30), (3, 3))
SIZES = ((300, 200), (1000,), ())


class Reader(threading.Thread):
    """Follows the name to the end of the job; every value of version of step k has to be k."""

    def __init__(self, address: str, number: int) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._dtype = torch.bfloat16 if number % 2 else None
        self.seen: list[int] = []
        self.mixed: list[str] = []
        self.delta_bytes = 0

    def run(self) -> None:
        with ps_worker.subscribe(
            "policy", coordinator=self._address, dtype=self._dtype, reconnect_timeout_seconds=90.0
        ) as versions:
            for version in versions:
                expected = torch.tensor(float(version.step)).to(self._dtype or torch.float32)
                for name, value in version.tensors().items():
                    if not torch.equal(value, expected.expand_as(value)):
                        self.mixed.append(f"version {version.number}, step {version.step}: {name}")
                self.seen.append(version.number)
            self.delta_bytes = versions.delta_bytes


def publishing(coordinator, stop, published, always_waits=False):
    """Train until ``stop`` so that each value is the number of the step, and publish after each step."""
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
    with ps_worker.connect(coordinator, device="cpu") as worker:
        optimizer = worker.optimizer(torch.optim.SGD, parameters, lr=1.0)
        step = 0
        while not stop.wait(0.01):
            step += 1
            for parameter in parameters:
                parameter.grad = -torch.ones_like(parameter)
            optimizer.step()
            waits = always_waits or step % 2 == 0
            published.append(worker.publish("policy", optimizer, step=step, wait=waits))


def test_no_reader_sees_a_mixed_version_while_servers_are_killed(launch, monkeypatch):
    chance = seeded()
    cluster = launch(2, lease_seconds=10.0, shard=["--durability", "durable"])
    monkeypatch.setenv("PS_RECONNECT_TIMEOUT", "90")
    monkeypatch.setenv("PS_TRANSPORT", "bulk")  # deltas, which readers of this host have no need of
    readers = [Reader(cluster.address, number) for number in range(READERS)]
    stop, published = threading.Event(), []

    trainer = threading.Thread(target=publishing, args=(cluster.address, stop, published), daemon=True)
    for thread in (trainer, *readers):
        thread.start()
    wait_until(lambda: all(reader.seen for reader in readers))
    for _ in range(KILLS):
        program = chance.choice([*cluster.shards, cluster.coordinator])
        program.kill()
        program.start()
        before = [len(reader.seen) for reader in readers]
        wait_until(lambda before=before: all(len(r.seen) > count + 1 for r, count in zip(readers, before, strict=True)))
        time.sleep(chance.random() * 0.2)
    stop.set()
    for thread in (trainer, *readers):
        thread.join(90)
        assert not thread.is_alive()
    for reader in readers:
        assert reader.mixed == []
        assert reader.seen == sorted(set(reader.seen))
        assert reader.seen[-1] == published[-1]
        assert reader.delta_bytes > 0
    print(f"{sum(len(reader.seen) for reader in readers)} versions seen of {published[-1]}")
