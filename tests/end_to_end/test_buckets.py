"""Gradients sent while backward still runs: the numbers stay those of the gradients as ``step`` finds them."""

from __future__ import annotations

import logging
from itertools import product

import pytest
import torch
from torch import nn

from ps_protocol.errors import NonFiniteGradient
from ps_protocol.model.layout import aligned
from ps_protocol.model.spec import Consistency, Mode
from ps_worker.step.shard_stream import ShardStream
from tests.end_to_end.training import assert_bitwise, assert_close, batches, loss_of, net, values
from tests.support.length import paired
from tests.worker.jobs import running_job

SYNC = Consistency(Mode.SYNC)
STEPS = [step[0] for step in batches(6)]


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch):
    """A bucket per variable or two, so that small models have several."""
    monkeypatch.setattr("ps_worker.step.overlap.BUCKET_BYTES", 64)


@pytest.fixture
def ahead(monkeypatch) -> list[list[tuple[int, int]]]:
    """The ranges that each push counted on having been sent ahead."""
    found: list[list[tuple[int, int]]] = []
    send = ShardStream.send

    def recorded(stream, push):
        found.append([span for span in push.staged[stream.shard] if span in stream._staged])
        send(stream, push)

    monkeypatch.setattr(ShardStream, "send", recorded)
    return found


def train(loop, transport="bulk", *, shards=1, overlap=True):
    with running_job(shards, 1, consistency=SYNC) as job, job.cluster(transport=transport) as cluster:
        model = net()
        loop(model, cluster.optimizer(torch.optim.SGD, model, lr=0.5, momentum=0.9, overlap=overlap))
        return values(model)


def plain(model, optimizer):
    for batch in STEPS:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def accumulating(model, optimizer):
    for first, second in zip(STEPS[::2], STEPS[1::2], strict=True):
        optimizer.zero_grad()
        for batch in (first, second):
            loss_of(model, batch).backward()
        optimizer.step()


def clipping(model, optimizer):
    for batch in STEPS:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()


@pytest.mark.parametrize(
    ("loop", "travel"), paired([plain, accumulating, clipping], list(product(["grpc", "bulk", "shm"], [1, 2])))
)
def test_training_gives_the_numbers_it_gives_without_overlap(loop, travel):
    transport, shards = travel
    assert_bitwise(train(loop, transport, shards=shards), train(loop, transport, shards=shards, overlap=False))


def test_a_large_model_gives_the_same_numbers_with_payloads_behind_their_messages(monkeypatch):
    monkeypatch.setattr("ps_worker.step.overlap.BUCKET_BYTES", 300_000)

    def loop(model, optimizer):
        for seed in range(3):
            optimizer.zero_grad()
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
            (model(x).square().sum() + sum(p.square().sum() for p in extra)).backward()
            optimizer.step()

    results = []
    for overlap in (False, True):
        for transport in ("grpc", "bulk"):
            with running_job(2, 1, consistency=SYNC) as job, job.cluster(transport=transport) as cluster:
                model = net()
                extra = [nn.Parameter(torch.full((80_000 + i,), 0.5)) for i in range(4)]
                both = [*model.parameters(), *extra]
                loop(model, cluster.optimizer(torch.optim.SGD, both, lr=0.1, overlap=overlap))
                results.append([p.detach().clone() for p in both])
    for other in results[1:]:
        assert_bitwise(other, results[0])


def test_all_gradients_of_a_plain_loop_go_ahead(ahead):
    train(plain)
    size = sum(aligned(p.nbytes) for p in net().parameters())
    assert all(sum(end - begin for begin, end in push) == size for push in ahead)
    assert len(ahead) == len(STEPS)


def test_accumulated_gradients_go_ahead_from_the_second_step_on(ahead):
    train(accumulating)
    assert ahead[0] == []
    assert all(ahead[1:])


def test_gradients_that_change_after_backward_are_not_sent_ahead_again(ahead, caplog):
    with caplog.at_level(logging.INFO, "ps_worker"):
        train(clipping)
    assert not any(ahead)
    assert "not sent ahead any more" in caplog.text


def test_an_unused_variable_is_left_alone_though_its_neighbours_went_ahead():
    def loop(model, optimizer):
        for number, batch in enumerate(STEPS):
            optimizer.zero_grad()
            part = model if number % 2 else nn.Sequential(*list(model)[:2])
            part(batch[0]).square().sum().backward()
            optimizer.step()

    assert_bitwise(train(loop), train(loop, overlap=False))


def test_a_refused_gradient_that_went_ahead_is_not_applied_later():
    with running_job(1, 1, consistency=SYNC) as job, job.cluster(transport="bulk") as cluster:
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.5, overlap=True)
        (model(STEPS[0][0]).sum() * float("nan")).backward()
        with pytest.raises(NonFiniteGradient):
            optimizer.step()
        optimizer.zero_grad()
        loss_of(model, STEPS[1]).backward()
        optimizer.step()
        wanted = net()
        reference = torch.optim.SGD(wanted.parameters(), lr=0.5)
        loss_of(wanted, STEPS[1]).backward()
        reference.step()
        assert_close(values(model), values(wanted))


def test_a_stream_that_breaks_in_backward_loses_nothing():
    def loop(model, optimizer):
        for number, batch in enumerate(STEPS):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            if number == 2:
                for stream in optimizer._model.pipeline.streams:
                    stream.interrupt()
            optimizer.step()

    assert_bitwise(train(loop, shards=2), train(loop, shards=2, overlap=False))


def test_a_shard_without_a_slice_is_left_alone():
    with running_job(3, 1, consistency=SYNC) as job, job.cluster() as cluster:
        parameter = nn.Parameter(torch.ones(1))
        optimizer = cluster.optimizer(torch.optim.SGD, [parameter], lr=1.0, overlap=True)
        (3 * parameter).sum().backward()
        optimizer.step()
        assert parameter.item() == -2.0
        assert optimizer.last.versions == (1,)
