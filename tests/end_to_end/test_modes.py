"""Async and bounded staleness with real shards: the bound holds, nothing is lost, the mode changes while running."""

from __future__ import annotations

import random
import threading

import pytest
import torch

import ps_worker
from ps_protocol.cluster.view import Role
from ps_protocol.model.spec import Consistency, Mode
from tests.end_to_end.training import assert_bitwise, batches, loss_of, net, run_workers, train, values
from tests.support.seeds import drawn_seed
from tests.support.shards import wait_until
from tests.worker.jobs import running_job

STEPS = [step[0] for step in batches(30)]


class Clocks:
    """Steps that each worker has finished, and the largest lead ever seen at the moment a step was answered."""

    def __init__(self, workers):
        self._lock = threading.Lock()
        self.pushed = [0] * workers
        self.live = [True] * workers
        self.bound = 0
        self.violations = []

    def about_to_push(self, rank):
        with self._lock:
            self.pushed[rank] += 1

    def answered(self, rank):
        """A worker that got its answer at step c may not be more than the bound ahead of what others began to push."""
        with self._lock:
            slowest = min(p for p, live in zip(self.pushed, self.live, strict=True) if live)
            if self.pushed[rank] - slowest > self.bound:
                self.violations.append((rank, list(self.pushed), self.bound))

    def gone(self, rank):
        with self._lock:
            self.live[rank] = False


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_nobody_gets_more_than_s_steps_ahead_of_a_slow_worker_and_all_go_on_when_it_leaves(bound):
    seed = drawn_seed()
    workers, clocks = 3, Clocks(3)
    clocks.bound = bound
    both_made_all_steps = threading.Barrier(2)

    def work(cluster):
        chance = random.Random(seed + cluster.rank)
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.01)
        mine = 8 if cluster.rank == 2 else len(STEPS)  # the slow one leaves early
        pause = threading.Event()
        for batch in STEPS[:mine]:
            pause.wait(0.02 if cluster.rank == 2 else chance.random() * 0.002)
            clocks.about_to_push(cluster.rank)
            train(model, optimizer, [batch])
            clocks.answered(cluster.rank)
        clocks.gone(cluster.rank)
        if cluster.rank != 2:
            # The last answers of two workers may lack each the other's step, on one shard.
            both_made_all_steps.wait(60)
            optimizer.pull()
        return optimizer.version

    with running_job(2, workers, consistency=Consistency(Mode.SSP, staleness=bound)) as job:
        versions = run_workers(job, workers, work)
    assert clocks.violations == []
    assert versions[:2] == [2 * len(STEPS) + 8] * 2


def test_the_bound_may_be_changed_while_workers_wait_for_it():
    ahead = []

    def work(cluster):
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.01)
        if cluster.rank == 1:
            # It never steps: worker 0 may make 1 step more than the bound, and then waits.
            wait_until(lambda: len(ahead) == 2)
            cluster.set_mode("ssp", staleness=5)
            wait_until(lambda: len(ahead) == 5)
            cluster.set_mode("async")
            wait_until(lambda: len(ahead) == 9)
            return
        for batch in STEPS[:9]:
            train(model, optimizer, [batch])
            ahead.append(optimizer.last.clock)

    with running_job(1, 2, consistency=Consistency(Mode.SSP, staleness=2)) as job:
        run_workers(job, 2, work)
    assert ahead == list(range(1, 10))


@pytest.mark.parametrize("mode", ["async", "ssp", "sync"])
def test_the_mode_changes_in_the_middle_of_a_training_and_no_push_is_lost(mode):
    others = [name for name in ("async", "ssp", "sync") if name != mode]

    def work(cluster):
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.01)
        for number, batch in enumerate(STEPS):
            if cluster.rank == 0 and number in (10, 20):
                chosen = others[number // 10 - 1]
                cluster.set_mode(chosen, staleness=1 if chosen == "ssp" else 0)
            train(model, optimizer, [batch])
        cluster.barrier()
        optimizer.pull()
        return values(model)

    with running_job(2, 3, consistency=Consistency(Mode(mode), staleness=1 if mode == "ssp" else 0)) as job:
        first, *rest = run_workers(job, 3, work)
    for parameters in rest:
        assert_bitwise(parameters, first)


def test_a_worker_that_dies_without_a_word_holds_the_others_for_one_lease_at_most(monkeypatch):
    # The end of its connection is noticed, and a worker that a busy machine keeps waiting does not lose its lease.
    monkeypatch.setattr("ps_server.coordinator.times.DISCONNECTED_SECONDS", 0.5)

    def work(cluster):
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.01)
        train(model, optimizer, STEPS[:1])
        if cluster.rank == 1:
            cluster._session._membership.close()  # silent from now on, as after kill -9
            return 0
        train(model, optimizer, STEPS[1:5])
        return optimizer.version

    with running_job(1, 2, consistency=Consistency(Mode.SYNC), lease_seconds=20.0) as job:
        assert run_workers(job, 2, work)[0] == 5
        # Its last heartbeat may come after the end of its connection.
        gone = job.member(Role.WORKER, 1).gone
        assert "no heartbeat came" in gone or "its lease of 20 s ended" in gone


def test_a_worker_that_raises_leaves_with_its_reason_and_the_others_go_on():
    def work(cluster):
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.01)
        for number, batch in enumerate(STEPS[:6]):
            if cluster.rank == 1 and number == 2:
                raise ZeroDivisionError("a defect of the script")
            train(model, optimizer, [batch])
        return optimizer.version

    with running_job(2, 2, consistency=Consistency(Mode.SYNC)) as job:
        with pytest.raises(ZeroDivisionError):
            run_workers(job, 2, work)
        assert "a defect of the script" in job.gone(1)
        assert job.gone(0) in ("", "left")


def test_a_nan_on_one_worker_is_that_worker_s_error_and_nothing_reaches_any_shard():
    def work(cluster):
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.01)
        if cluster.rank == 1:
            loss_of(model, STEPS[0]).backward()
            model[2].bias.grad[0] = float("nan")
            with pytest.raises(ps_worker.NonFiniteGradient, match=r"2\.bias"):
                optimizer.step()
            return optimizer.version
        return 0

    with running_job(2, 2) as job:
        assert run_workers(job, 2, work)[1] == 0


@pytest.mark.parametrize("mode", [Mode.ASYNC, Mode.SYNC])
def test_a_skipped_nan_moves_the_clock_so_that_nobody_waits_for_it(mode):
    def work(cluster):
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.01, nonfinite="skip")
        outcomes = []
        for number, batch in enumerate(STEPS[:4]):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            if cluster.rank == 1 and number == 1:
                model[0].weight.grad.fill_(float("inf"))
            optimizer.step()
            outcomes.append(optimizer.last.outcome.name)
        return outcomes

    with running_job(2, 2, consistency=Consistency(mode)) as job:
        outcomes = run_workers(job, 2, work)
    assert outcomes[0] == ["APPLIED"] * 4
    assert outcomes[1] == ["APPLIED", "SKIPPED", "APPLIED", "APPLIED"]


def test_a_second_job_with_another_model_gets_one_error_that_lists_the_differences():
    def work(cluster):
        if cluster.rank == 0:
            cluster.optimizer(torch.optim.SGD, net(), lr=0.01)
        cluster.barrier()
        if cluster.rank == 1:
            other = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
            with pytest.raises(ps_worker.ModelMismatch) as failure:
                cluster.optimizer(torch.optim.SGD, other, lr=0.01)
            return str(failure.value)
        return ""

    with running_job(1, 2) as job:
        text = run_workers(job, 2, work)[1]
    assert "0.weight" in text
    assert "2.weight" in text


def test_an_empty_loader_makes_no_step_and_ends_cleanly():
    def work(cluster):
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.01)
        train(model, optimizer, cluster.shard(torch.utils.data.DataLoader([])))
        return optimizer.version

    with running_job(1, 2) as job:
        assert run_workers(job, 2, work) == [0, 0]


def test_a_shard_that_came_back_empty_is_not_filled_with_new_values_by_a_worker_that_joins():
    with running_job(2, 1) as job:
        with job.cluster(rank=0) as cluster:
            model = net()
            train(model, cluster.optimizer(torch.optim.SGD, model, lr=0.01), STEPS[:1])
        job.stop_shard(1)
        job.start_shard(1)
        wait_until(lambda: len(job.view.live(Role.SHARD)) == 2)
        with job.cluster(rank=0) as cluster, pytest.raises(ps_worker.StateLost, match="shard 1"):
            cluster.optimizer(torch.optim.SGD, net(), lr=0.01)
