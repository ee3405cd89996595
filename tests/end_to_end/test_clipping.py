"""``clip_grad_norm``: training is that of one process that clips the gradient of the joined batch. Costs 5 s."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from ps_protocol.errors import ConfigError, ModelMismatch, NotReady, UnsupportedOptimizer
from ps_protocol.model.spec import Consistency, Mode
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.cli.options.checkpoint import CheckpointConfig
from tests.end_to_end.one_process import Network, alone, joined, loss_of, steps_of, together
from tests.end_to_end.training import assert_bitwise, assert_close, run_workers
from tests.support.length import paired
from tests.worker.jobs import running_job

SIZES = [(3, 3)] * 6
CLIP = 0.5


@pytest.mark.parametrize(("tables", "shards"), paired([True, False], [3, 2, 1]))
def test_in_sync_the_mean_is_clipped_as_one_process_clips_the_gradient_of_the_joined_batch(tables, shards):
    steps = steps_of(SIZES)
    batches = [joined(step) for step in steps]
    settings = {"clip_grad_norm": CLIP}
    found = together(steps, torch.optim.Adam, tables=tables, shards=shards, settings=settings, lr=0.05)
    for values in found:
        assert_bitwise(values, found[0])
        assert_close(values, alone(batches, torch.optim.Adam, tables=tables, clip=CLIP, lr=0.05))
    free = alone(batches, torch.optim.Adam, tables=tables, lr=0.05)
    assert max(float((a - b).abs().max()) for a, b in zip(found[0], free, strict=True)) > 1e-3


def test_with_weights_the_weighed_mean_is_clipped():
    steps = steps_of([(5, 1), (2, 4), (1, 6)])
    found = together(
        steps,
        torch.optim.SGD,
        tables=True,
        weigh=lambda batch: len(batch[0]),
        settings={"clip_grad_norm": CLIP},
        lr=0.1,
        momentum=0.9,
    )
    batches = [joined(step) for step in steps]
    assert_close(found[1], alone(batches, torch.optim.SGD, tables=True, clip=CLIP, lr=0.1, momentum=0.9))


@pytest.mark.parametrize("kind", ["scaled for mixed precision", "adopted"])
def test_a_scaled_gradient_is_clipped_unscaled_and_an_adopted_optimizer_clips_too(kind):
    steps = steps_of(SIZES)

    def work(cluster):
        model = Network(None)
        if adopted := kind == "adopted":
            optimizer = cluster.adopt(torch.optim.SGD(model.parameters(), lr=0.1), model, clip_grad_norm=CLIP)
        else:
            optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1, clip_grad_norm=CLIP)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=not adopted)
        for step in steps:
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step[cluster.rank])).backward()
            scaler.step(optimizer)
            scaler.update()
        return [p.detach().clone() for p in model.parameters()]

    with running_job(2, 2, consistency=Consistency(Mode.SYNC)) as job:
        found = run_workers(job, 2, work)
    wanted = alone([joined(step) for step in steps], torch.optim.SGD, tables=False, clip=CLIP, lr=0.1)
    assert_close(found[0], wanted)


@pytest.mark.parametrize("mode", [Mode.ASYNC, Mode.SSP])
def test_where_pushes_are_applied_alone_each_is_clipped_with_the_norm_of_the_whole_push(mode):
    steps = [[step[0]] for step in steps_of(SIZES)]
    found = together(steps, torch.optim.SGD, tables=True, mode=mode, settings={"clip_grad_norm": CLIP}, lr=0.1)
    wanted = alone([step[0] for step in steps], torch.optim.SGD, tables=True, clip=CLIP, lr=0.1)
    assert_close(found[0], wanted)


def test_gradients_below_the_norm_are_left_as_they_are():
    steps = steps_of(SIZES[:2])
    plain, clipped = (
        together(steps, torch.optim.SGD, tables=True, settings=settings, lr=0.1)
        for settings in ({}, {"clip_grad_norm": 1e6})
    )
    assert_bitwise(plain[0], clipped[0])


@pytest.mark.parametrize("norm", [0, -1.0, float("inf"), float("nan"), True, "1"])
def test_a_norm_that_nothing_can_be_clipped_to_is_refused(norm):
    def work(cluster):
        with pytest.raises(ConfigError, match="clip_grad_norm"):
            cluster.optimizer(torch.optim.SGD, Network(None), lr=0.1, clip_grad_norm=norm)

    with running_job(1, 1) as job:
        run_workers(job, 1, work)


def test_workers_that_clip_differently_are_told_so():
    def work(cluster):
        clip = (CLIP, None)[cluster.rank]
        try:
            cluster.optimizer(torch.optim.SGD, Network(None), lr=0.1, clip_grad_norm=clip)
        except ModelMismatch as error:
            return str(error)
        cluster.barrier()
        return ""

    with running_job(1, 2, consistency=Consistency(Mode.SYNC)) as job:
        told = [each for each in run_workers(job, 2, work) if each]
    assert len(told) == 1
    assert "clip_grad_norm" in told[0]


def test_a_group_that_is_added_later_would_have_a_norm_of_its_own_and_is_refused():
    def work(cluster):
        model = Network(None)
        optimizer = cluster.optimizer(torch.optim.SGD, model.body.parameters(), lr=0.1, clip_grad_norm=CLIP)
        with pytest.raises(UnsupportedOptimizer, match="clipped together"):
            optimizer.add_param_group({"params": list(model.head.parameters())})

    with running_job(1, 1) as job:
        run_workers(job, 1, work)


def test_checkpoints_that_are_made_meanwhile_find_every_step_on_all_shards_or_on_none(tmp_path):
    steps = steps_of([(3, 3)] * 40)
    done = threading.Event()

    def work(cluster):
        model = Network(None)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.05, momentum=0.5, clip_grad_norm=CLIP)
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, step[cluster.rank]).backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    def checkpoint(job, taken):
        while not (taken and done.is_set()):
            with suppress(NotReady):
                taken.append(job.client.checkpoint()[0])

    taken: list[str] = []
    with running_job(2, 2, consistency=Consistency(Mode.SYNC), checkpoints=CheckpointConfig(tmp_path)) as job:
        beside = threading.Thread(target=checkpoint, args=(job, taken))
        beside.start()
        try:
            found = run_workers(job, 2, work)
        finally:
            done.set()
            beside.join()
    batches = [joined(step) for step in steps]
    wanted = alone(batches, torch.optim.SGD, tables=False, clip=CLIP, lr=0.05, momentum=0.5)
    assert_close(found[0], wanted, 1e-5)
    assert taken
    for folder in taken:
        if Path(folder).exists():  # old ones are deleted
            facts = Checkpoint.open(Path(folder)).manifest.models["model"].facts
            assert len({tuple(each["tracker"]["applied"]) for each in facts}) == 1
