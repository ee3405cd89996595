"""What a shard applied, replayed by a single-threaded reference, gives the bytes it serves."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from ps_protocol.model.spec import Consistency, Mode
from ps_server.optimizers.shard_optimizer import ShardOptimizer
from ps_server.state.region import Region
from tests.support.length import paired
from tests.support.seeds import drawn_seed
from tests.support.shards import RecordingLog, StubStream, flat, gradients, running_shard, start

OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.05},
    "RMSprop": {"lr": 0.01},
}
MODES = [Consistency(Mode.ASYNC), Consistency(Mode.SSP, staleness=2), Consistency(Mode.SYNC)]
WORKERS = 3
STEPS = 20


def train(shard, model, rank, seed):
    """One worker that loses replies, repeats pushes and opens new streams at random."""
    chance = random.Random(seed)
    stream = StubStream(shard, rank, incarnation=rank + 1)
    for step in range(1, STEPS + 1):
        payload = flat(model.layout, *gradients(model, seed * 1000 + step))
        while True:
            stream.push(payload, sequence=step, clock=step)
            if chance.random() < 0.3:  # the reply is dropped; whether the push arrived is not known
                stream.cancel()
                stream = StubStream(shard, rank, incarnation=rank + 1)
                continue
            stream.result()
            break
    stream.end()


@pytest.mark.parametrize(("optimizer", "mode"), paired(list(OPTIMIZERS), MODES), ids=str)
def test_no_push_is_lost_or_doubled_and_a_replay_gives_the_same_bytes(optimizer, mode):
    seed = drawn_seed()
    log = RecordingLog()
    with running_shard({rank: rank + 1 for rank in range(WORKERS)}, mode, log) as shard:
        model, initial = start(shard, optimizer=f"torch.optim.{optimizer}", **OPTIMIZERS[optimizer])
        workers = [
            threading.Thread(target=train, args=(shard, model, rank, seed + rank), daemon=True)
            for rank in range(WORKERS)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert not any(worker.is_alive() for worker in workers)
        served = shard.take(model)[0].region.data.clone()

    pushes = [(info.worker.rank, info.sequence) for update, _ in log.updates for info in update.pushes]
    assert sorted(pushes) == [(rank, step) for rank in range(WORKERS) for step in range(1, STEPS + 1)]
    assert [update.version for update, _ in log.updates] == list(range(1, len(log.updates) + 1))

    region, scratch = Region(model.layout), Region(model.layout)
    region.data.copy_(torch.frombuffer(bytearray(padded(model.layout, initial)), dtype=torch.uint8))
    replayed = ShardOptimizer(model.layout, region)
    for update, gradient_bytes in log.updates:
        scratch.data.copy_(gradient_bytes)
        replayed.apply(scratch, update.step.absent, update.step.options, update.step.scale)
    assert torch.equal(region.data, served)


def padded(layout, tensors):
    """The region that holds ``tensors``."""
    region = Region(layout)
    for index, tensor in enumerate(tensors):
        region.slice(index).copy_(tensor)
    return bytes(region.bytes)
