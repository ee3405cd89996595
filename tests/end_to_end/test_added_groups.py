"""Parameter groups that are added in the middle of a training, against torch. In one process, about 6 s."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ps_protocol.cluster.view import Role
from ps_protocol.errors import ModelMismatch, NonFiniteGradient, PsError, UnsupportedOptimizer
from ps_protocol.model.spec import Consistency, Mode
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.directory import committed
from ps_server.cli.options.checkpoint import CheckpointConfig
from ps_worker import Outcome, rows
from ps_worker.session.session import Session
from tests.end_to_end.training import assert_close, batches, concatenated, loss_of, net, run_workers, train, values
from tests.worker.jobs import running_job

STEPS = batches(9, workers=2)


def head_only(model: nn.Sequential, **options: float) -> torch.optim.Optimizer:
    """As Lightning's BackboneFinetuning begins: the backbone is frozen and in no group."""
    model[0].requires_grad_(False)
    return torch.optim.AdamW(model[2].parameters(), lr=0.05, **options)


def unfreeze(model: nn.Sequential, optimizer: torch.optim.Optimizer, *names: str) -> None:
    parameters = [p for name, p in model[0].named_parameters() if name in names]
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimizer.add_param_group({"params": parameters, "lr": optimizer.param_groups[-1]["lr"] / 2})


def finetune(model, optimizer, steps):
    train(model, optimizer, steps[:3])
    unfreeze(model, optimizer, "weight")
    train(model, optimizer, steps[3:6])
    unfreeze(model, optimizer, "bias")
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.8)
    train(model, optimizer, steps[6:], lambda model: scheduler.step())


@pytest.mark.parametrize(("mode", "settings"), [(Mode.ASYNC, {}), (Mode.SYNC, {}), (Mode.SYNC, {"overlap": True})])
def test_groups_that_are_added_train_as_with_torch(mode, settings):
    workers = 2 if mode is Mode.SYNC else 1
    reference = net()
    plain = head_only(reference)
    finetune(reference, plain, [concatenated(step) for step in STEPS])

    def work(cluster):
        model = net()
        optimizer = cluster.adopt(head_only(model), model, **settings)
        finetune(model, optimizer, [s[cluster.rank] if workers == 2 else concatenated(s) for s in STEPS])
        optimizer.finish()
        saved = optimizer.state_dict()
        assert len(optimizer.last.versions) == 3 * 2
        assert set(optimizer.state[model[0].bias]) == {"step", "exp_avg", "exp_avg_sq"}
        cluster.barrier()
        return values(model), saved

    with running_job(2, workers, consistency=Consistency(mode)) as job:
        found = run_workers(job, workers, work)
    expected = plain.state_dict()
    for own, saved in found:
        assert_close(own, values(reference))
        assert saved["param_groups"] == expected["param_groups"]
        assert saved["state"].keys() == expected["state"].keys()
        for number, state in expected["state"].items():
            for name, value in state.items():
                torch.testing.assert_close(saved["state"][number][name], value, rtol=0, atol=1e-6)


def test_a_state_of_added_groups_is_loaded_into_as_many():
    model, reference = net(), net()
    plain = head_only(reference)
    finetune(reference, plain, [step[0] for step in STEPS])
    saved = plain.state_dict()
    with running_job(2, 1) as job, job.cluster(rank=0) as cluster:
        optimizer = cluster.adopt(head_only(model), model)
        with pytest.raises(ValueError, match="different number of parameter groups"):
            optimizer.load_state_dict(saved)
        unfreeze(model, optimizer, "weight")
        unfreeze(model, optimizer, "bias")
        model.load_state_dict(reference.state_dict())
        optimizer.load_state_dict(saved)
        for each, own in ((model, optimizer), (reference, plain)):
            train(each, own, [step[1] for step in STEPS[:3]])
        assert_close(values(model), values(reference))
        optimizer.pull()
        assert_close(values(model), values(reference))


@pytest.mark.parametrize("policy", ["refuse", "skip"])
@pytest.mark.parametrize("place", [0, 2])
def test_a_gradient_that_is_not_finite_stops_the_step_of_all_groups(policy, place):
    with running_job(1, 1) as job, job.cluster(rank=0) as cluster:
        model = net()
        optimizer = cluster.adopt(head_only(model), model, nonfinite=policy)
        unfreeze(model, optimizer, "weight", "bias")
        before = values(model)
        loss_of(model, STEPS[0][0]).backward()
        model[place].weight.grad[0, 0] = float("nan")
        if policy == "refuse":
            with pytest.raises(NonFiniteGradient, match="nothing was sent") as caught:
                optimizer.step()
            assert caught.value.variable == f"{place}.weight"
        else:
            optimizer.step()
            assert optimizer.step_was_skipped
            assert optimizer.last.outcomes == (Outcome.SKIPPED, Outcome.SKIPPED)
        assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))
        train(model, optimizer, [STEPS[0][0]])
        assert optimizer.last.outcome is Outcome.APPLIED


@pytest.mark.parametrize("late", [False, True], ids=["", "views come late"])
def test_workers_that_add_other_parameters_get_an_error_and_train_on(late, monkeypatch):
    if late:
        # The one that is refused tries again before its view has the model of the other.
        monkeypatch.setattr(Session, "epoch", lambda self, model: 0)

    def work(cluster):
        model = net()
        optimizer = cluster.adopt(head_only(model), model)
        own, other = ("weight", "bias") if cluster.rank == 0 else ("bias", "weight")
        error = ""
        try:
            unfreeze(model, optimizer, own)
        except ModelMismatch as mismatch:
            error = str(mismatch)
            assert len(optimizer.param_groups) == 1
            unfreeze(model, optimizer, other)
        train(model, optimizer, [step[cluster.rank] for step in STEPS[:2]])
        cluster.barrier()
        return error, values(model)

    with running_job(1, 2, consistency=Consistency(Mode.SYNC)) as job:
        found = run_workers(job, 2, work)
    (error,) = [error for error, _ in found if error]
    assert "declared model 'model+1' differently" in error
    assert "is missing" in error
    assert_close(found[0][1], found[1][1], atol=0)


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.ASYNC])
def test_a_worker_that_comes_back_adds_the_group_again_without_waiting_for_the_others(mode):
    back = threading.Event()

    def begin(cluster):
        model = net()
        return model, cluster.adopt(head_only(model), model)

    def stay(job):
        with job.cluster(rank=0) as cluster:
            model, optimizer = begin(cluster)
            unfreeze(model, optimizer, "weight", "bias")
            steps = 0
            while not back.is_set() or steps < 4:
                train(model, optimizer, [STEPS[steps % len(STEPS)][0]])
                steps += 1
            cluster.barrier()
            return values(model)

    def come_and_go(job):
        with job.cluster(rank=1) as cluster:
            model, optimizer = begin(cluster)
            unfreeze(model, optimizer, "weight", "bias")
            train(model, optimizer, [STEPS[0][1], STEPS[1][1]])
        with job.cluster(rank=1) as cluster:
            model, optimizer = begin(cluster)
            unfreeze(model, optimizer, "weight", "bias")
            train(model, optimizer, [STEPS[0][1], STEPS[1][1]])
            back.set()
            cluster.barrier()
            return values(model)

    with running_job(1, 2, consistency=Consistency(mode)) as job, ThreadPoolExecutor(2) as pool:
        one, other = pool.submit(stay, job), pool.submit(come_and_go, job)
        assert_close(one.result(60), other.result(60), atol=0)


def test_workers_that_add_a_group_after_different_steps_do_not_wait_for_each_other_for_ever():
    def work(cluster):
        model = net()
        optimizer = cluster.adopt(head_only(model), model)
        before = 3 if cluster.rank == 1 else 2
        train(model, optimizer, [step[cluster.rank] for step in STEPS[:before]])
        unfreeze(model, optimizer, "weight", "bias")
        train(model, optimizer, [step[cluster.rank] for step in STEPS[3:6]])
        return values(model)

    with running_job(1, 2, consistency=Consistency(Mode.SYNC)) as job:
        one, other = run_workers(job, 2, work)
    assert_close(one, other, atol=0)


def test_parameters_that_have_a_group_already_are_refused_as_by_torch():
    with running_job(1, 1) as job, job.cluster(rank=0) as cluster:
        model = net()
        optimizer = cluster.adopt(torch.optim.SGD(model.parameters(), lr=0.1), model)
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": model[0].weight})
        other = net()
        second = cluster.optimizer(torch.optim.SGD, other, lr=0.1)
        with pytest.raises(PsError, match="belongs to the optimizer of model 'model-1' already"):
            optimizer.add_param_group({"params": other[0].weight})
        assert len(optimizer.param_groups) == len(second.param_groups) == 1


def test_a_model_with_tables_gets_no_more_groups():
    with running_job(1, 1) as job, job.cluster(rank=0) as cluster:
        model = nn.Sequential(cluster.embedding(4, name="ids", optimizer=rows.SGD(lr=0.1)), nn.Linear(4, 1))
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        with pytest.raises(UnsupportedOptimizer, match="with tables cannot get more") as caught:
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        assert "requires_grad=False" in caught.value.remedy


def test_added_groups_are_in_checkpoints_and_can_be_followed(tmp_path):
    def begin(cluster):
        model = net()
        optimizer = cluster.adopt(head_only(model), model)
        unfreeze(model, optimizer, "weight", "bias")
        return model, optimizer

    with running_job(2, 1, checkpoints=CheckpointConfig(tmp_path)) as job, job.cluster(rank=0) as cluster:
        model, optimizer = begin(cluster)
        train(model, optimizer, [step[0] for step in STEPS[:3]])
        job.client.checkpoint()
        served = net(seed=3)
        with job.cluster(Role.EVALUATOR) as evaluator:
            for name, part in (("model", "2."), ("model+1", "0.")):
                pairs = [(n, p) for n, p in served.named_parameters() if n.startswith(part)]
                next(evaluator.follow(pairs, name))
        assert_close(values(served), values(model), atol=0)
        train(model, optimizer, [step[1] for step in STEPS[:3]])
        undisturbed = values(model)
    with running_job(3, 1, saved=Checkpoint.open(committed(tmp_path)[-1])) as job, job.cluster(rank=0) as cluster:
        model, optimizer = begin(cluster)
        train(model, optimizer, [step[1] for step in STEPS[:3]])
    assert_close(values(model), undisturbed)
