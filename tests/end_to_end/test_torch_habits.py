"""A plain PyTorch loop keeps its meaning on a cluster: each feature against the same loop in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ps_worker
from ps_protocol.model.spec import Consistency, Mode
from tests.end_to_end.training import assert_bitwise, assert_close, batches, loss_of, net, run_workers, train, values
from tests.worker.jobs import running_job

STEPS = [step[0] for step in batches(6)]


def on_cluster(work, *, shards=2, workers=1, mode=Mode.ASYNC):
    """``work(cluster)`` on a real cluster; the result of rank 0."""
    with running_job(shards, workers, consistency=Consistency(mode)) as job:
        return run_workers(job, workers, work)[0]


def both_ways(loop, make=net, torch_class=torch.optim.SGD, **arguments):
    """The same ``loop(model, optimizer)`` with torch's optimizer and with the cluster's: final values of both."""

    def work(cluster):
        model = make()
        loop(model, cluster.optimizer(torch_class, groups_of(model), **arguments))
        return values(model)

    def groups_of(model):
        return model.groups() if hasattr(model, "groups") else model

    alone = make()
    source = alone.groups() if hasattr(alone, "groups") else alone.parameters()
    loop(alone, torch_class(source, **arguments))
    return on_cluster(work), values(alone)


def plain(model, optimizer, steps=STEPS):
    train(model, optimizer, steps)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("Adam", {"lr": 0.01, "amsgrad": True}),
        ("AdamW", {"lr": 0.01}),
        ("Adagrad", {"lr": 0.1, "lr_decay": 0.1}),
        ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.5}),
        ("Adadelta", {}),
        ("Adamax", {"lr": 0.01}),
        ("NAdam", {"lr": 0.01}),
        ("RAdam", {"lr": 0.01}),
        ("ASGD", {"lr": 0.1}),
        ("Rprop", {"lr": 0.01}),
        ("Adafactor", {"lr": 0.01}),
    ],
)
def test_torch_s_own_optimizers_give_torch_s_own_results(name, arguments):
    found, wanted = both_ways(plain, torch_class=getattr(torch.optim, name), **arguments)
    assert_close(found, wanted)


def test_muon_runs_on_whole_matrices():
    class Matrices(nn.Sequential):
        def groups(self):
            return [p for p in self.parameters() if p.dim() == 2]

    def make():
        model = Matrices(*net())
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dim() == 2)
        return model

    found, wanted = both_ways(plain, make, torch.optim.Muon, lr=0.01)
    assert_close(found, wanted, atol=1e-5)


def test_parameter_groups_have_their_own_arguments():
    class Grouped(nn.Sequential):
        def groups(self):
            return [{"params": list(self[0].parameters()), "lr": 0.5}, {"params": list(self[2].parameters())}]

    found, wanted = both_ways(plain, lambda: Grouped(*net()), lr=0.1, momentum=0.9)
    assert_close(found, wanted)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=6),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    ],
    ids=["StepLR", "CosineAnnealingLR", "OneCycleLR (momentum too)", "LambdaLR"],
)
def test_learning_rate_schedulers_work(schedule):
    def loop(model, optimizer):
        scheduler = schedule(optimizer)
        for batch in STEPS:
            plain(model, optimizer, [batch])
            scheduler.step()

    found, wanted = both_ways(loop, lr=0.1, momentum=0.9)
    assert_close(found, wanted)


def test_gradient_clipping_and_accumulation_keep_their_meaning():
    def loop(model, optimizer):
        for number, batch in enumerate(STEPS):
            loss_of(model, batch).backward()
            if number % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()

    found, wanted = both_ways(loop, lr=0.1)
    assert_close(found, wanted)


def test_a_closure_is_evaluated_once_with_gradients_and_its_loss_returned():
    losses = []

    def loop(model, optimizer):
        for batch in STEPS:

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())

    found, wanted = both_ways(loop, lr=0.1)
    assert_close(found, wanted)
    assert losses[: len(STEPS)] == pytest.approx(losses[len(STEPS) :])


class Parts(nn.Module):
    """A tied, a frozen, a sometimes unused and a scalar parameter."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.body = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.sometimes = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(6, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        self.tied.weight = self.body.weight
        self.use = False

    def forward(self, x):
        x = self.frozen(self.tied(self.body(x).tanh())) * self.scale
        return self.head(self.sometimes(x) if self.use else x)


def test_frozen_tied_unused_and_scalar_parameters_are_treated_as_torch_treats_them():
    def loop(model, optimizer):
        for number, batch in enumerate(STEPS):
            model.use = number % 3 == 0
            plain(model, optimizer, [batch])

    found, wanted = both_ways(loop, Parts, torch.optim.AdamW, lr=0.05, weight_decay=0.3)
    assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_parameters_of_other_dtypes_and_of_several_at_once(dtype):
    def make():
        model = net()
        model[2].to(dtype)
        return model

    def loop(model, optimizer):
        for x, y in STEPS:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model[2](model[1](model[0](x)).to(dtype)).float(), y).backward()
            optimizer.step()

    # Powers of two: in 16 bits torch rounds their products alike in the vector part of a tensor and in the rest behind
    # it, which begins elsewhere where variables lie in one arena. Of other numbers the last bit would differ.
    found, wanted = both_ways(loop, make, lr=0.125, momentum=0.5)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 if a.dtype.itemsize >= 4 else 4e-3)


def test_a_gan_trains_two_models_with_two_optimizers():
    def loop(one, two, first, second):
        for batch in STEPS:
            first.zero_grad()
            (loss_of(one, batch) + two(batch[0]).square().mean()).backward()
            first.step()
            second.zero_grad()
            loss_of(two, batch).backward()
            second.step()

    def work(cluster):
        one, two = net(1), net(2)
        first = cluster.optimizer(torch.optim.Adam, one, lr=0.01)
        second = cluster.optimizer(torch.optim.SGD, two, lr=0.1, momentum=0.5)
        loop(one, two, first, second)
        return values(one) + values(two)

    one, two = net(1), net(2)
    loop(one, two, torch.optim.Adam(one.parameters(), lr=0.01), torch.optim.SGD(two.parameters(), lr=0.1, momentum=0.5))
    assert_close(on_cluster(work), values(one) + values(two))


def test_rank_0_s_initial_values_and_buffers_win():
    def work(cluster):
        torch.manual_seed(cluster.rank)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        own = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            model[1].running_mean.fill_(cluster.rank + 1.0)
        cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        return own, model.state_dict()

    with running_job(2, 2) as job:
        (own, first), (_, second) = run_workers(job, 2, work)
    assert_bitwise(list(first.values()), list(second.values()))
    assert torch.equal(second["0.weight"], own["0.weight"])
    assert torch.equal(second["1.running_mean"], torch.full((4,), 1.0))


@pytest.mark.parametrize("policy", ["rank0", "average"])
def test_batchnorm_statistics_are_rank_0_s_or_the_mean(policy):
    def work(cluster):
        model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4, momentum=1.0))
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.0, buffers=policy)
        x = torch.full((4, 6), 1.0 + cluster.rank) + torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
        model(x).sum().backward()
        own = model[1].running_mean.clone()
        optimizer.step()
        cluster.barrier()
        return own, model[1].running_mean.clone(), int(model[1].num_batches_tracked)

    with running_job(1, 2, consistency=Consistency(Mode.SYNC)) as job:
        (own0, found0, seen0), (own1, found1, seen1) = run_workers(job, 2, work)
    assert not torch.equal(own0, own1)
    wanted = own0 if policy == "rank0" else (own0 + own1) / 2
    for found in (found0, found1):
        torch.testing.assert_close(found, wanted)
    assert (seen0, seen1) == (1, 1)


def test_the_optimizer_s_state_goes_into_plain_torch_and_trains_on_alike():
    def work(cluster):
        model = net()
        optimizer = cluster.optimizer(torch.optim.Adam, model, lr=0.01)
        plain(model, optimizer, STEPS[:3])
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        plain(model, optimizer, STEPS[3:])
        return saved, values(model)

    (weights, state), wanted = on_cluster(work)
    model = net(9)
    model.load_state_dict(weights)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    optimizer.load_state_dict(state)
    plain(model, optimizer, STEPS[3:])
    assert_close(values(model), wanted)


def test_plain_torch_s_state_goes_into_the_cluster_and_trains_on_alike():
    alone = net()
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.01)
    plain(alone, optimizer, STEPS[:3])
    weights, state = copy.deepcopy((alone.state_dict(), optimizer.state_dict()))
    plain(alone, optimizer, STEPS[3:])

    def work(cluster):
        model = net(9)
        model.load_state_dict(weights)
        optimizer = cluster.optimizer(torch.optim.Adam, model, lr=0.5)
        optimizer.load_state_dict(state)
        plain(model, optimizer, STEPS[3:])
        return values(model)

    assert_close(on_cluster(work), values(alone))


def test_a_loader_with_forked_processes_feeds_a_worker_its_share_once_per_epoch():
    def work(cluster):
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        data = TensorDataset(torch.randn(30, 6), torch.randint(3, (30,)), torch.arange(30))
        loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=2)
        seen = []
        for _ in range(2):
            for x, y, number in cluster.shard(loader):
                optimizer.zero_grad()
                loss_of(model, (x, y)).backward()
                optimizer.step()
                seen += number.tolist()
        return seen

    with running_job(1, 1) as job:
        (seen,) = run_workers(job, 1, work)
    assert sorted(seen[:30]) == list(range(30)) == sorted(seen[30:])
    assert seen[:30] != seen[30:]


def test_grad_scaler_skips_a_step_with_an_overflow_and_takes_the_others():
    def loop(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number, batch in enumerate(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            if number == 2:
                model[0].weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()

    found, wanted = both_ways(loop, lr=0.1)
    assert_close(found, wanted)


def test_arguments_may_stand_in_torch_s_order_and_a_parameter_belongs_to_one_optimizer():
    def work(cluster):
        model = net()
        plain(model, cluster.optimizer(torch.optim.SGD, model, 0.1, 0.9))
        with pytest.raises(ps_worker.PsError, match=r"'0\.weight' belongs to the optimizer of model 'model' already"):
            cluster.optimizer(torch.optim.SGD, model, 0.1)
        return values(model)

    alone = net()
    plain(alone, torch.optim.SGD(alone.parameters(), 0.1, 0.9))
    assert_close(on_cluster(work), values(alone))


def test_with_groups_and_module_statistics_are_the_same_on_all_workers_after_a_barrier():
    def work(cluster):
        torch.manual_seed(cluster.rank)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        groups = [{"params": [p]} for p in model.parameters()]
        optimizer = cluster.optimizer(torch.optim.SGD, groups, module=model, lr=0.1)
        for inputs, labels in STEPS:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs + 3 * cluster.rank), labels).backward()
            optimizer.step()
        cluster.barrier()
        return [value.clone() for value in model.state_dict().values()]

    with running_job(2, 2, consistency=Consistency(Mode.SYNC)) as job:
        one, other = run_workers(job, 2, work)
    assert_bitwise(one, other)
