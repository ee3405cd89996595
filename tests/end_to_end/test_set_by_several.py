"""Values that are set while several workers train: the cluster's from then on, or an error that names the variable."""

from __future__ import annotations

import copy
import logging
import threading

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.spec import Consistency, Mode
from ps_worker.memory import local_writes
from ps_worker.step import assigned_values
from tests.end_to_end.setting import (
    STEPS,
    WEIGHTS,
    Words,
    on_cluster,
    train,
)
from tests.end_to_end.training import assert_bitwise, assert_close, batches, concatenated, loss_of, net, run_workers
from tests.end_to_end.training import values as values_of
from tests.support.length import paired
from tests.worker.jobs import running_job


@pytest.mark.parametrize("mode", [Mode.ASYNC, Mode.SSP, Mode.SYNC])
def test_values_averaged_over_training_are_everybodys_after_the_barrier(mode):
    def work(cluster):
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        average = AveragedModel(copy.deepcopy(model))
        for batch in STEPS:
            train(model, optimizer, [batch])
            average.update_parameters(model)
        cluster.barrier()
        if cluster.rank == 0:
            model.load_state_dict(average.module.state_dict())
        cluster.barrier()
        return values_of(model), values_of(average.module)

    with running_job(2, 2, consistency=Consistency(mode)) as job:
        (first, wanted), (second, _) = run_workers(job, 2, work)
    assert_bitwise(first, wanted)
    assert_bitwise(second, wanted)


@pytest.mark.parametrize("whole_bytes", [local_writes.WHOLE_BYTES, 0])
def test_what_is_set_past_torch_before_a_barrier_is_everybodys_after_it(whole_bytes, monkeypatch):
    monkeypatch.setattr(local_writes, "WHOLE_BYTES", whole_bytes)

    def work(cluster):
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        train(model, optimizer)
        cluster.barrier()
        if cluster.rank == 0:
            for name, value in model.named_parameters():
                value.data.copy_(WEIGHTS[name])
        cluster.barrier()
        return values_of(model)

    with running_job(2, 2, consistency=Consistency(Mode.ASYNC)) as job:
        for found in run_workers(job, 2, work):
            assert_bitwise(found, list(WEIGHTS.values()))


def test_assign_sets_the_clusters_values_in_any_mode():
    def work(cluster):
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        train(model, optimizer, STEPS[:2])
        cluster.barrier()
        if cluster.rank == 1:
            model.load_state_dict(WEIGHTS)
            optimizer.assign()
        cluster.barrier()
        return values_of(model)

    with running_job(2, 2, consistency=Consistency(Mode.ASYNC)) as job:
        for found in run_workers(job, 2, work):
            assert_bitwise(found, list(WEIGHTS.values()))


def clamp_in_place(weight):
    with torch.no_grad():
        weight.clamp_(-0.01, 0.01)


def clamp_data(weight):
    weight.data.clamp_(-0.01, 0.01)


@pytest.mark.parametrize(("write", "steps"), [(clamp_in_place, 1), (clamp_data, 5)])
def test_what_is_set_while_others_train_in_async_is_one_error_that_names_the_variable(write, steps):
    def work(cluster):
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        train(model, optimizer, STEPS[:steps])
        write(model[2].weight)
        with pytest.raises(InvalidRequest, match="updates of other workers may be lost") as caught:
            train(model, optimizer, STEPS[1:2])
        assert caught.value.variable == "2.weight"
        assert "optimizer.assign()" in caught.value.remedy
        optimizer.pull()
        train(model, optimizer, STEPS[1:2])
        # Until then neither is alone.
        cluster.barrier()

    with running_job(2, 2, consistency=Consistency(Mode.ASYNC)) as job:
        run_workers(job, 2, work)


def test_in_sync_what_one_rank_sets_otherwise_than_the_lowest_is_an_error_on_it():
    def work(cluster):
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        train(model, optimizer, STEPS[:1])
        if cluster.rank == 1:
            with torch.no_grad():
                model[0].bias.fill_(1)
            with pytest.raises(InvalidRequest, match="lowest rank has set other values, or none") as caught:
                train(model, optimizer, STEPS[1:2])
            assert caught.value.variable == "0.bias"
            optimizer.pull()
        train(model, optimizer, STEPS[1:2])
        return values_of(model)

    with running_job(2, 2, consistency=Consistency(Mode.SYNC)) as job:
        found = run_workers(job, 2, work)
    assert_bitwise(found[0], found[1])


def test_refuse_and_ignore_do_so():
    def refuse(model, optimizer):
        model.load_state_dict(WEIGHTS)
        with pytest.raises(InvalidRequest, match='writes="refuse"'):
            train(model, optimizer)
        optimizer.pull()
        train(model, optimizer)

    def ignore(model, optimizer):
        model.load_state_dict(WEIGHTS)
        train(model, optimizer, STEPS[:1])

    on_cluster(refuse, writes="refuse")
    (found,) = on_cluster(ignore, writes="ignore")
    assert not torch.equal(found[0], next(iter(WEIGHTS.values())))
    model = net()
    gradient_at_what_was_set = net()
    gradient_at_what_was_set.load_state_dict(WEIGHTS)
    loss_of(gradient_at_what_was_set, STEPS[0]).backward()
    wanted = [p - 0.1 * q.grad for p, q in zip(values_of(model), gradient_at_what_was_set.parameters(), strict=True)]
    assert_close(found, wanted)


def test_with_overlap_what_is_set_before_training_counts_and_later_it_is_an_error():
    def program(model, optimizer):
        model.load_state_dict(WEIGHTS)
        train(model, optimizer, STEPS[:1])
        optimizer.finish()
        assert_close(values_of(model), wanted)
        train(model, optimizer, STEPS[1:2])
        with torch.no_grad():
            model[0].bias.fill_(1)
        with pytest.raises(InvalidRequest, match="overlap"):
            train(model, optimizer, STEPS[2:3])

    other = net()
    other.load_state_dict(WEIGHTS)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9), STEPS[:1])
    wanted = values_of(other)

    def work(cluster):
        model = net()
        program(model, cluster.optimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9, overlap=True))

    with running_job(2, 1, consistency=Consistency(Mode.ASYNC)) as job:
        run_workers(job, 1, work)


def test_a_worker_that_joins_a_trained_model_takes_the_clusters_values_and_says_so(caplog):
    with running_job(2, 1) as job:
        with job.cluster(rank=0) as first:
            model = net()
            optimizer = first.optimizer(torch.optim.SGD, model, lr=0.1)
            train(model, optimizer, STEPS[:2])
            with torch.no_grad():
                model[2].bias.fill_(2)
        with job.cluster(rank=0) as again, caplog.at_level(logging.WARNING, "ps_worker"):
            model = net()
            optimizer = again.optimizer(torch.optim.SGD, model, lr=0.1)
            # What was set after the last step of the first.
            assert bool((model[2].bias == 2).all())
            before = values_of(model)
            model.load_state_dict(WEIGHTS)
            loss_of(model, STEPS[0]).backward()
            gradients = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            assert_close(values_of(model), [b - 0.1 * g for b, g in zip(before, gradients, strict=True)])
            assert "has been trained already" in caplog.text
            assert "'0.weight'" in caplog.text


def test_the_mean_of_two_batches_is_taken_at_what_was_set():
    steps = batches(3, 2)

    def clamp(model):
        for p in model.parameters():
            p.data.clamp_(-0.2, 0.2)

    def work(cluster):
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        train(model, optimizer, [step[cluster.rank] for step in steps], clamp)
        return values_of(model)

    with running_job(2, 2, consistency=Consistency(Mode.SYNC)) as job:
        found = run_workers(job, 2, work)
    model = net()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), map(concatenated, steps), clamp)
    assert_close(found[0], values_of(model))


@pytest.mark.parametrize("mode", [Mode.ASYNC, Mode.SSP])
def test_before_training_a_rank_that_set_other_values_than_the_lowest_takes_those_and_says_so(mode, caplog):
    """Also where others have trained on them by then; a rank that set the same says nothing."""

    def work(cluster):
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        # Nobody joins a model that has been trained.
        together.wait(30)
        model.load_state_dict(WEIGHTS)
        if cluster.rank == 0:
            train(model, optimizer, STEPS[:1])
        elif cluster.rank == 1:
            with torch.no_grad():
                model[2].bias.add_(1)
        together.wait(30)
        if cluster.rank > 0:
            train(model, optimizer, STEPS[:1])
        # The lowest rank is there until then, or another would be it.
        together.wait(30)

    together = threading.Barrier(3)
    with (
        running_job(2, 3, consistency=Consistency(mode, 2 * (mode is Mode.SSP))) as job,
        caplog.at_level(logging.WARNING, "ps_worker"),
    ):
        run_workers(job, 3, work)
    said = [record.getMessage() for record in caplog.records if "was set on rank" in record.getMessage()]
    assert len(said) == 1
    assert "'2.bias' was set on rank 1 before its first step, and not so on the lowest rank" in said[0]


def normalise(model):
    """A change that is another one where it is made twice."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5).add_(0.1)


@pytest.mark.parametrize(
    ("mode", "meets_and_adopts"),
    paired([Mode.SYNC, Mode.SSP, Mode.ASYNC], [(False, False), (True, False), (False, True), (True, True)]),
)
def test_all_ranks_begin_with_the_same_values_whoever_changes_them_first(mode, meets_and_adopts, caplog):
    """Rank 1 comes when rank 0 has changed what it began with, and would step on it, or meet at a barrier."""
    meets, adopts = meets_and_adopts

    def work(cluster):
        if cluster.rank == 1:
            changed.wait(30)
        model = net(seed=cluster.rank)
        if adopts:
            optimizer = cluster.adopt(torch.optim.SGD(model.parameters(), lr=0.0), model)
        else:
            optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.0)
        first = values_of(model)
        normalise(model)
        if cluster.rank == 0:
            threading.Timer(0.3, changed.set).start()
        if meets:
            cluster.barrier()
        train(model, optimizer, STEPS[:1])
        cluster.barrier()
        return first, values_of(model)

    changed = threading.Event()
    wanted = net(seed=0)
    normalise(wanted)
    with (
        running_job(2, 2, consistency=Consistency(mode, 2 * (mode is Mode.SSP))) as job,
        caplog.at_level(logging.WARNING, "ps_worker"),
    ):
        for first, last in run_workers(job, 2, work):
            assert_bitwise(first, values_of(net(seed=0)))
            assert_bitwise(last, values_of(wanted))
    assert "was set on rank" not in caplog.text


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.ASYNC])
def test_values_that_are_set_at_the_start_do_not_wait_for_a_worker_that_is_lost_there(mode, monkeypatch):
    monkeypatch.setattr("ps_server.coordinator.times.DISCONNECTED_SECONDS", 0.5)
    with running_job(2, 2, consistency=Consistency(mode)) as job:
        lost = threading.Thread(target=lambda: job.cluster(rank=1)._session._membership.close())
        lost.start()
        with job.cluster(rank=0) as cluster:
            lost.join()
            model = net()
            optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.0)
            model.load_state_dict(WEIGHTS)
            train(model, optimizer, STEPS[:1])
            assert_bitwise(values_of(model), list(WEIGHTS.values()))


def test_a_worker_that_does_not_train_the_model_is_not_waited_for_for_ever_in_async(caplog, monkeypatch):
    monkeypatch.setattr("ps_protocol.times.PATIENCE_SECONDS", 0.2)

    def work(cluster):
        if cluster.rank == 0:
            model = net()
            optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.0)
            model.load_state_dict(WEIGHTS)
            train(model, optimizer, STEPS[:1])
            trained.set()
            return
        trained.wait(30)

    trained = threading.Event()
    with running_job(2, 2) as job, caplog.at_level(logging.WARNING, "ps_worker"):
        run_workers(job, 2, work)
    assert "worker 1 has not called cluster.optimizer(...) for it in time" in caplog.text


@pytest.mark.parametrize("stepped", [True, False])
def test_what_another_rank_than_the_lowest_sets_last_is_said_at_the_end(stepped, caplog, monkeypatch):
    monkeypatch.setattr("ps_worker.times.LAST_VALUES_SECONDS", 0.1)

    def work(cluster):
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        train(model, optimizer, STEPS[: 2 * stepped])
        if cluster.rank == 1:
            with torch.no_grad():
                model[0].bias.fill_(7)
        # Rank 0 is there until the other has left.
        if cluster.rank == 0:
            left.wait(30)
        else:
            cluster.close()
            left.set()

    left = threading.Event()
    with running_job(2, 2, consistency=Consistency(Mode.SYNC)) as job, caplog.at_level(logging.WARNING, "ps_worker"):
        run_workers(job, 2, work)
    assert "'0.bias' was set on rank 1 after its last step and is not the cluster's" in caplog.text
    assert "call cluster.barrier() before the end" in caplog.text


def test_in_sync_rows_that_each_rank_renormalises_for_its_own_batch_are_one_error_that_names_the_embedding():
    def work(cluster):
        model = Words()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        model.head(model.embedding(torch.tensor([cluster.rank]))).square().sum().backward()
        if cluster.rank == 0:
            optimizer.step()
            return None
        with pytest.raises(InvalidRequest, match="lowest rank has set other values, or none") as caught:
            optimizer.step()
        return caught.value

    with running_job(2, 2, consistency=Consistency(Mode.SYNC)) as job:
        _, error = run_workers(job, 2, work)
    assert error.variable == "embedding.weight"
    assert "max_norm" in error.remedy


def test_a_worker_that_joins_a_trained_model_does_not_set_its_values_at_a_barrier_either(caplog):
    with running_job(2, 1) as job:
        with job.cluster(rank=0) as first:
            model = net()
            train(model, first.optimizer(torch.optim.SGD, model, lr=0.1), STEPS[:2])
            wanted = values_of(model)
        with job.cluster(rank=0) as again, caplog.at_level(logging.WARNING, "ps_worker"):
            model = net()
            again.optimizer(torch.optim.SGD, model, lr=0.1)
            model.load_state_dict(WEIGHTS)
            again.barrier()
            assert_bitwise(values_of(model), wanted)
    assert caplog.text.count("has been trained already") == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_set_stays_while_a_worker_waits_for_others_in_a_collective_call(overlap):
    """Steps without gradients let the others go on meanwhile, and bring parameters."""

    def work(cluster):
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1, overlap=overlap)
        train(model, optimizer, STEPS[: 2 + cluster.rank])
        if cluster.rank == 0:
            model.load_state_dict(WEIGHTS)
        cluster.gather_values(None)
        found = values_of(model)
        cluster.barrier()
        return found, values_of(model)

    with running_job(2, 2, consistency=Consistency(Mode.SYNC)) as job:
        (found, first), (_, second) = run_workers(job, 2, work)
    assert_bitwise(found, list(WEIGHTS.values()))
    assert_bitwise(first, found)
    assert_bitwise(second, found)


#: Made once: workers are threads, which would draw from one generator.
LARGE = torch.nn.Sequential(torch.nn.Linear(6, 3000), torch.nn.Tanh(), torch.nn.Linear(3000, 3))


def large() -> torch.nn.Module:
    """More than is compared whole in every step."""
    return copy.deepcopy(LARGE)


@pytest.mark.parametrize("mode", [Mode.ASYNC, Mode.SYNC])
@pytest.mark.parametrize(("make", "way"), paired([net, large], ["copy", "data"]))
def test_sam_trains_with_two_workers(mode, make, way, caplog):
    """It moves the parameters to where the loss is worst, takes the gradient there, and puts them back before step."""

    def ascend(model):
        for parameter in model.parameters():
            if way == "copy":
                with torch.no_grad():
                    parameter.add_(parameter.grad, alpha=0.05)
            else:
                parameter.data = parameter.data + 0.05 * parameter.grad

    def put_back(model, own):
        for parameter, values in zip(model.parameters(), own, strict=True):
            if way == "copy":
                with torch.no_grad():
                    parameter.copy_(values)
            else:
                parameter.data = values

    def steps(model, optimizer, given):
        for batch in given:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            own = [p.detach().clone() for p in model.parameters()]
            ascend(model)
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            put_back(model, own)
            optimizer.step()

    def work(cluster):
        model = make()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        before = values_of(model)
        steps(model, optimizer, STEPS)
        cluster.barrier()
        return before, values_of(model)

    with running_job(2, 2, consistency=Consistency(mode)) as job, caplog.at_level(logging.WARNING, "ps_worker"):
        (before, first), (_, second) = run_workers(job, 2, work)
    assert_bitwise(first, second)
    assert not torch.equal(first[0], before[0])
    assert "was written to" not in caplog.text
    if mode is Mode.SYNC:
        alone = make()
        steps(alone, torch.optim.SGD(alone.parameters(), lr=0.1), STEPS)
        assert_close(first, values_of(alone))


def test_in_async_weights_swapped_for_an_evaluation_are_no_error(caplog):
    def work(cluster):
        model = large()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        train(model, optimizer, STEPS)
        for _ in range(2):
            own = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict({name: 0.5 * value for name, value in own.items()})
            model.load_state_dict(own)
            train(model, optimizer, STEPS[:2])
        # Part of a variable that is written a second time is known to be set.
        with torch.no_grad():
            model[0].weight[7].fill_(1)
        with pytest.raises(InvalidRequest, match="updates of other workers may be lost"):
            train(model, optimizer, STEPS[:1])
        optimizer.pull()
        cluster.barrier()

    with running_job(2, 2, consistency=Consistency(Mode.ASYNC)) as job, caplog.at_level(logging.WARNING, "ps_worker"):
        run_workers(job, 2, work)
    # Once for each worker.
    assert caplog.text.count("they count as put back") == 2


@pytest.mark.parametrize(("mode", "first"), paired([Mode.SYNC, Mode.ASYNC], [0, 1]))
@pytest.mark.parametrize("alike", [True, False])
def test_what_all_ranks_set_last_is_kept_and_said_only_where_they_differ(mode, first, alike, caplog, monkeypatch):
    """Whichever rank comes to its end first."""
    monkeypatch.setattr("ps_worker.times.LAST_VALUES_SECONDS", 60)
    ending = threading.Event()
    sent = assigned_values.AssignedValues._sent_at_end

    def noted(values, written):
        found = sent(values, written)
        ending.set()
        return found

    monkeypatch.setattr(assigned_values.AssignedValues, "_sent_at_end", noted)

    def work(cluster):
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        train(model, optimizer, STEPS[:2])
        cluster.barrier()
        factor = 1 if alike else 1 + cluster.rank
        model.load_state_dict({name: factor * value for name, value in WEIGHTS.items()})
        if cluster.rank != first:
            ending.wait(60)
        cluster.close()

    with running_job(2, 2, consistency=Consistency(mode)) as job, caplog.at_level(logging.WARNING, "ps_worker"):
        run_workers(job, 2, work)
        with job.cluster(rank=0) as cluster:
            model = net(seed=5)
            cluster.optimizer(torch.optim.SGD, model, lr=0.1)
            assert_bitwise(values_of(model), list(WEIGHTS.values()))
    said = [record.getMessage() for record in caplog.records if "was set" in record.getMessage()]
    assert len(said) == (not alike), said


def test_values_that_were_put_back_are_no_matter_at_the_end(caplog):
    def work(cluster):
        model = large()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        train(model, optimizer, STEPS)
        cluster.barrier()
        own = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict({name: 0.5 * value for name, value in own.items()})
        model.load_state_dict(own)

    with running_job(2, 2, consistency=Consistency(Mode.ASYNC)) as job, caplog.at_level(logging.WARNING, "ps_worker"):
        run_workers(job, 2, work)
    assert "was set" not in caplog.text


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.ASYNC])
def test_buffers_that_get_another_shape_are_refused_on_all_ranks(mode):
    """As the observers of quantization-aware training, whose first forward gives them theirs."""

    class Observed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(6, 3)
            self.register_buffer("minimum", torch.zeros(0))

        def forward(self, x):
            self.minimum = x.detach().amin(0)
            return self.layer(x)

    def work(cluster):
        model = Observed()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        with pytest.raises(InvalidRequest, match="the buffer 'minimum' has another shape"):
            train(model, optimizer, STEPS[:1])

    with running_job(2, 2, consistency=Consistency(mode)) as job:
        run_workers(job, 2, work)
