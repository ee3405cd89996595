"""Readers behind a relay while it, readers, shards and the coordinator are killed: each version they see is whole."""

from __future__ import annotations

import signal
import threading

from ps_protocol.launch.ports import free_port
from tests.recovery.test_published_weights import Reader, publishing
from tests.support.interpreters import Interpreter
from tests.support.length import choose
from tests.support.seeds import seeded
from tests.support.shards import wait_until

READERS, KILLS = choose((6, 30), (2, 3))

READING = """
import sys, ps_worker
with ps_worker.subscribe("policy", coordinator=sys.argv[1], cache=sys.argv[2]) as versions:
    for version in versions:
        values = [value for value in version.tensors().values() if value.numel()]
        assert all((value == version.step).all() for value in values), version
        print(version.number, flush=True)
"""


class RelayProcess:
    """``psctl weights relay`` in a process of its own, on one port."""

    def __init__(self, coordinator: str) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._coordinator = coordinator
        self.start()

    def start(self) -> None:
        port = self.address.rpartition(":")[2]
        told = ["--coordinator", self._coordinator, "weights", "relay", "policy", "--port", port]
        self.process = Interpreter("-c", "from ps_server.entry import psctl; psctl()", *told)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.close()


def test_no_reader_behind_a_relay_sees_a_mixed_version_whatever_is_killed(launch, monkeypatch, tmp_path):
    chance = seeded()
    cluster = launch(2, lease_seconds=10.0, shard=["--durability", "durable"])
    monkeypatch.setenv("PS_RECONNECT_TIMEOUT", "90")
    relay = RelayProcess(cluster.address)
    readers = [Reader(relay.address, number) for number in range(READERS)]
    stop, published = threading.Event(), []

    trainer = threading.Thread(target=publishing, args=(cluster.address, stop, published, True), daemon=True)
    try:
        for thread in (trainer, *readers):
            thread.start()
        wait_until(lambda: all(reader.seen for reader in readers))
        for number in range(KILLS):
            # The relay every second time; a reader process each time, wherever it is.
            killed = relay if number % 2 else chance.choice([*cluster.shards, cluster.coordinator])
            process = Interpreter("-c", READING, relay.address, str(tmp_path))
            assert process.stdout.readline().strip()
            killed.kill()
            process.close()
            killed.start()
            before = [len(reader.seen) for reader in readers]
            wait_until(lambda before=before: all(len(r.seen) > count for r, count in zip(readers, before, strict=True)))
        stop.set()
        for thread in (trainer, *readers):
            thread.join(90)
            assert not thread.is_alive()
    finally:
        relay.kill()
    for reader in readers:
        assert reader.mixed == []
        assert reader.seen == sorted(set(reader.seen))
        assert reader.seen[-1] == published[-1]
