"""Workers that are told to end again and again: every sample is in the parameters once, on all shards. 8 s of CPU."""

from __future__ import annotations

import random
import signal
import time

import pytest
import torch

from tests.support.interpreters import Interpreter
from tests.support.length import choose
from tests.support.seeds import drawn_seed
from tests.worker.jobs import Job, running_job

ITEMS = choose(2000, 800)
TOLD_TO_END = choose(40, 3)
#: A worker that is told to end comes no further, however late it is told.
MOST_STEPS = 100

WORKER = f"""
import sys
import time
import torch
from torch.utils.data import DataLoader, TensorDataset
import ps_worker
from ps_worker.data import leased_loader

leased_loader.BRIEF_CALL_SECONDS = 20.0
with ps_worker.connect(sys.argv[1], device="cpu") as cluster:
    parameters = [torch.nn.Parameter(torch.zeros(20_000)) for _ in range(2)]
    optimizer = cluster.optimizer(torch.optim.SGD, parameters, lr=1.0, overlap=sys.argv[2] == "overlap")
    loader = cluster.shard(DataLoader(TensorDataset(torch.arange({ITEMS})), batch_size=2))
    print("begun", flush=True)
    for number, (batch,) in enumerate(loader):
        while number == int(sys.argv[3]):
            time.sleep(0.1)
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, -float(len(batch)))
        optimizer.step()
"""
"""Adds the number of samples to every element of two parameters, one on each shard.

The last argument is the number of steps after which it waits for SIGTERM, -1 for one that trains to the end.
"""


def trained(job: Job) -> list[torch.Tensor]:
    """What the shards hold at the end."""
    with job.cluster() as cluster:
        parameters = [torch.nn.Parameter(torch.zeros(20_000)) for _ in range(2)]
        cluster.optimizer(torch.optim.SGD, parameters, lr=1.0)
        return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("style", ["plain", "overlap"])
def test_workers_that_are_told_to_end_lose_no_step_and_repeat_none(style: str) -> None:
    seed = drawn_seed()
    chance = random.Random(seed)
    with running_job(shards=2, workers=0, lease_seconds=60.0) as job:
        codes = []
        for turn in range(TOLD_TO_END + 1):
            last = MOST_STEPS if turn < TOLD_TO_END else -1
            worker = Interpreter("-c", WORKER, job.address, style, str(last), PS_TERMINATION_SECONDS="60")
            try:
                # The last one, and one that finds no data, trains to the end.
                assert worker.stdout.readline() == "begun\n"
                if turn < TOLD_TO_END:
                    # At any point of a step.
                    time.sleep(chance.uniform(0, 0.05))
                    worker.terminate()
                codes.append(worker.wait())
            finally:
                worker.close()
        assert set(codes) <= {0, 128 + signal.SIGTERM}
        assert codes[0] == 128 + signal.SIGTERM
        assert codes[-1] == 0
        for parameter in trained(job):
            assert parameter.eq(ITEMS).all(), f"seed {seed}: {parameter.min()} to {parameter.max()}, not {ITEMS}"
