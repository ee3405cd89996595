"""Central storage: synchronous training on several workers is the training of one process."""

from __future__ import annotations

import logging
import random

import pytest
import torch

from ps_protocol.model.spec import Consistency, Mode
from tests.end_to_end.training import (
    assert_bitwise,
    assert_close,
    batches,
    concatenated,
    loss_of,
    net,
    run_workers,
    train_alone,
    values,
)
from tests.support.length import few, paired
from tests.support.seeds import drawn_seed
from tests.support.shards import wait_until
from tests.worker.jobs import running_job

SYNC = Consistency(Mode.SYNC)
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}


def train_together(workers, steps, torch_class, arguments, *, shards=2, before_step=lambda rank, step: None):
    """Final parameters of each worker after ``steps`` on a real cluster."""

    def work(cluster):
        model = net(seed=cluster.rank)  # only rank 0's values may matter
        optimizer = cluster.optimizer(torch_class, model, **arguments)
        for number, step in enumerate(steps):
            optimizer.zero_grad()
            loss_of(model, step[cluster.rank]).backward()
            before_step(cluster.rank, number)
            optimizer.step()
        return values(model)

    with running_job(shards, workers, consistency=SYNC) as job:
        return run_workers(job, workers, work)


@pytest.mark.parametrize(("workers", "optimizer"), paired([1, 2, 4], list(OPTIMIZERS)))
def test_sync_training_is_that_of_one_process_on_the_concatenated_batch(workers, optimizer):
    torch_class, arguments = OPTIMIZERS[optimizer]
    steps = batches(12, workers)
    found = train_together(workers, steps, torch_class, arguments)
    wanted = train_alone(net(0), map(concatenated, steps), torch_class, **arguments)
    for parameters in found:
        assert_bitwise(parameters, found[0])
        assert_close(parameters, wanted)


@pytest.mark.parametrize("optimizer", few(OPTIMIZERS, 2))
def test_two_runs_with_shuffled_arrival_give_the_same_bytes(optimizer):
    torch_class, arguments = OPTIMIZERS[optimizer]
    workers, steps = 3, batches(8, 3)
    seed = drawn_seed()

    def shuffled(seed):
        turns = Turns(workers, seed)
        return train_together(workers, steps, torch_class, arguments, before_step=turns.wait)[0]

    assert_bitwise(shuffled(seed), shuffled(seed + 1))


class Turns:
    """Lets the workers of each step pass in a random order, one after another."""

    def __init__(self, workers, seed):
        self._workers = workers
        self._seed = seed
        self._passed = {}

    def wait(self, rank, step):
        order = random.Random(f"{self._seed} {step}").sample(range(self._workers), self._workers)
        ahead = order.index(rank)
        wait_until(lambda: self._passed.get(step, 0) == ahead)
        self._passed[step] = ahead + 1


def test_workers_with_uneven_data_end_cleanly_and_the_rest_train_on():
    steps = batches(6, 2)

    def work(cluster):
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        for step in steps[: 6 if cluster.rank == 0 else 4]:
            optimizer.zero_grad()
            loss_of(model, step[cluster.rank]).backward()
            optimizer.step()
        return values(model)

    with running_job(1, 2, consistency=SYNC) as job:
        found, _ = run_workers(job, 2, work)
    alone = [concatenated(step) for step in steps[:4]] + [step[0] for step in steps[4:]]
    assert_close(found, train_alone(net(), alone, torch.optim.SGD, lr=0.1))


def test_a_barrier_after_uneven_data_holds_nobody_and_the_next_steps_pair_up_again():
    steps = batches(8, 2)

    def work(cluster):
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)

        def train(some):
            for step in some:
                optimizer.zero_grad()
                loss_of(model, step[cluster.rank]).backward()
                optimizer.step()

        train(steps[: 4 if cluster.rank == 0 else 3])
        cluster.barrier()
        train(steps[4:])
        cluster.barrier()
        return values(model)

    with running_job(2, 2, consistency=SYNC) as job:
        found = run_workers(job, 2, work)
    alone = [concatenated(s) for s in steps[:3]] + [steps[3][0]] + [concatenated(s) for s in steps[4:]]
    wanted = train_alone(net(), alone, torch.optim.SGD, lr=0.1)
    for parameters in found:
        assert_close(parameters, wanted)


def test_a_backup_worker_is_not_waited_for_and_catches_up_with_the_others():
    steps = batches(10, 3)
    slow_may_go = []

    def work(cluster):
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        outcomes = []
        for number, step in enumerate(steps):
            if cluster.rank == 2 and number == 1:
                wait_until(lambda: len(slow_may_go) == 2)
            optimizer.zero_grad()
            loss_of(model, step[cluster.rank]).backward()
            optimizer.step()
            outcomes += optimizer.last.outcomes
            if number == 5 and cluster.rank != 2:
                slow_may_go.append(cluster.rank)
        return outcomes

    with running_job(1, 3, consistency=Consistency(Mode.SYNC, backup=1)) as job:
        _, _, slow = run_workers(job, 3, work)
    assert "LATE" in [outcome.name for outcome in slow]


def test_a_worker_whose_options_are_not_used_is_told_so_once(caplog):
    """ReduceLROnPlateau on a local loss is how ranks come to differ."""

    def work(cluster):
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9)
        for number, step in enumerate(batches(4, 2)):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + number * cluster.rank)
            optimizer.zero_grad()
            loss_of(model, step[cluster.rank]).backward()
            optimizer.step()
        return values(model)

    with caplog.at_level(logging.WARNING, "ps_worker"), running_job(2, 2, consistency=Consistency(Mode.SYNC)) as job:
        one, other = run_workers(job, 2, work)
    assert_bitwise(one, other)
    told = [
        r.getMessage() for r in caplog.records if r.name == "ps_worker" and "options of the lowest" in r.getMessage()
    ]
    assert len(told) == 1
    assert "lr of group 0 is 0.1 on worker 0 and is used, 0.05 on worker 1 is not" in told[0]
    assert "same numbers on all workers" in told[0]
