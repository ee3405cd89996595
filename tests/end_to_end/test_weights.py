"""Pushes that are weighed: uneven batches give what one process gives on all samples. Costs 2 s."""

from __future__ import annotations

import pytest
import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.spec import Consistency, Mode
from tests.end_to_end.one_process import Batch, Network, alone, joined, loss_of, steps_of, together
from tests.end_to_end.training import assert_bitwise, assert_close, run_workers
from tests.worker.jobs import running_job

SIZES = [(5, 1), (2, 4), (3, 3), (1, 7), (4, 2)]


def samples(batch: Batch) -> int:
    return len(batch[0])


@pytest.mark.parametrize(("tables", "shards"), [(True, 2), (False, 1)])
def test_weighed_with_their_samples_uneven_batches_train_as_in_one_process(tables, shards):
    steps = steps_of(SIZES)
    wanted = alone([joined(step) for step in steps], torch.optim.Adam, tables=tables, lr=0.05)
    found = together(steps, torch.optim.Adam, tables=tables, shards=shards, weigh=samples, lr=0.05)
    for values in found:
        assert_bitwise(values, found[0])
        assert_close(values, wanted)
    unweighed = together(steps, torch.optim.Adam, tables=tables, shards=shards, lr=0.05)
    assert max(float((a - b).abs().max()) for a, b in zip(unweighed[0], wanted, strict=True)) > 1e-3


def test_equal_weights_give_the_bytes_of_no_weights():
    steps = steps_of([(3, 3), (2, 2)])
    plain, weighed = (
        together(steps, torch.optim.SGD, tables=True, weigh=weigh, lr=0.1) for weigh in (lambda batch: None, samples)
    )
    assert_bitwise(plain[0], weighed[0])


def test_a_push_without_a_weight_weighs_one_beside_those_that_have_one():
    steps = steps_of([(3, 1)])
    wanted = alone([joined(step) for step in steps], torch.optim.SGD, tables=False, lr=0.1)
    found = together(
        steps, torch.optim.SGD, tables=False, weigh=lambda batch: 3 if samples(batch) == 3 else None, lr=0.1
    )
    assert_close(found[0], wanted)


def test_where_a_push_is_applied_alone_its_weight_has_no_effect():
    steps = [[step[0]] for step in steps_of(SIZES)]
    plain, weighed = (
        together(steps, torch.optim.SGD, tables=True, mode=Mode.ASYNC, weigh=weigh, lr=0.1)
        for weigh in (lambda batch: None, samples)
    )
    assert_bitwise(plain[0], weighed[0])


@pytest.mark.parametrize("weight", [0, -1.0, float("inf"), float("nan"), "many", torch.ones(2), 1 << 2000])
def test_a_weight_that_no_mean_can_be_taken_with_is_refused_by_the_worker_and_nothing_is_sent(weight):
    def work(cluster):
        model = Network(None)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        before = [p.detach().clone() for p in model.parameters()]
        loss_of(model, steps_of([(2,)])[0][0]).backward()
        with pytest.raises(InvalidRequest, match="weight that no mean"):
            optimizer.step(weight=weight)
        optimizer.pull()
        assert_bitwise([p.detach() for p in model.parameters()], before)
        optimizer.step(weight=torch.tensor(2.0))
        return optimizer.version

    with running_job(1, 1, consistency=Consistency(Mode.SYNC)) as job:
        assert run_workers(job, 1, work) == [1]
