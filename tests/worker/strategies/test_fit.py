"""fit and evaluate: the numbers of a plain loop, on one device, on workers in step, and on replicas. 6 CPU seconds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ps_worker
from ps_worker import ConfigError, DamagedData
from ps_worker.strategies import fit as fitting
from ps_worker.strategies.fit import Callback, EarlyStopping, grouped
from tests.end_to_end.training import net
from tests.worker.jobs import running_job, together
from tests.worker.strategies.replicas import Replicas
from tests.worker.strategies.same_training import JOINED, dataset

LOSS = nn.functional.cross_entropy


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def fit(s, epochs=2, *, clip=None, **named: Any):
    """A fit of the common training, prepared to clip to ``clip``; its history and parameters."""
    model, optimizer = s.prepare(net(), torch.optim.SGD, lr=0.1, momentum=0.9, clip_grad_norm=clip)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    loader = DataLoader(dataset(), batch_size=JOINED // s.replicas)
    options = {"validation": loader, "metrics": {"accuracy": accuracy}, "progress": False}
    history = s.fit(model, loader, loss=LOSS, epochs=epochs, scheduler=scheduler, **options, **named)
    return history, [p.tolist() for p in s.unwrap(model).state_dict().values()]


def by_hand(epochs=2, accumulate=1, clip=None):
    """The same in plain torch: the mean losses of the epochs, and parameters."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    losses = []
    for _ in range(epochs):
        batches = list(DataLoader(dataset(), batch_size=JOINED))
        found = []
        for first in range(0, len(batches), accumulate):
            group = batches[first : first + accumulate]
            optimizer.zero_grad()
            for x, y in group:
                loss = LOSS(model(x), y)
                (loss / len(group)).backward()
                found.append(loss.item())
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
        losses.append(sum(found) / len(found))
    return losses, model


def assert_fits(found, losses, model):
    history, parameters = found
    torch.testing.assert_close([logs["loss"] for logs in history], losses, rtol=0, atol=1e-6)
    for one, other in zip(parameters, model.state_dict().values(), strict=True):
        torch.testing.assert_close(torch.tensor(one), other, rtol=0, atol=1e-6)


@pytest.fixture
def s():
    return ps_worker.strategy("one_device", device="cpu")


CLIP = 0.05


@pytest.mark.parametrize(
    ("options", "clip"),
    [
        ({}, None),
        ({"accumulate": 2}, None),
        ({"clip_grad_norm": CLIP}, CLIP),
        ({"clip": CLIP, "accumulate": 2}, CLIP),
        ({"clip": CLIP, "clip_grad_norm": CLIP}, CLIP),
    ],
)
def test_fit_is_the_plain_loop(s, options, clip):
    assert_fits(fit(s, **options), *by_hand(accumulate=options.get("accumulate", 1), clip=clip))


def test_a_norm_of_fit_ends_with_it_and_another_than_that_of_prepare_is_refused(s):
    model, optimizer = s.prepare(net(), torch.optim.SGD, lr=0.1)
    s.fit(model, DataLoader(dataset()), loss=LOSS, clip_grad_norm=CLIP, steps_per_epoch=1, progress=False)
    assert not optimizer._optimizer_step_pre_hooks
    with pytest.raises(ConfigError, match=r"expected: clip_grad_norm=0\.05, as in prepare.*actual: 1"):
        fit(s, clip=CLIP, clip_grad_norm=1.0)


@pytest.mark.parametrize("fused", [False, True])
def test_with_a_scaled_loss_unscaled_gradients_are_clipped(s, fused):
    found = []
    for precision in ("fp32", "fp16"):
        model, _ = s.prepare(net(), torch.optim.SGD, lr=0.5, fused=fused, clip_grad_norm=CLIP)
        before = [p.detach().clone() for p in model.parameters()]
        s.fit(model, DataLoader(dataset(), 24), loss=LOSS, precision=precision, steps_per_epoch=1, progress=False)
        moved = torch.cat([(p - old).flatten() for p, old in zip(model.parameters(), before, strict=True)])
        found.append(moved.norm().item())
    assert found == pytest.approx([0.5 * CLIP] * 2, rel=1e-3)


def test_validation_is_measured_after_each_epoch_in_eval_mode(s):
    history, _ = fit(s)
    _, model = by_hand()
    x, y = dataset().tensors
    with torch.no_grad():
        assert history[-1]["val_loss"] == pytest.approx(LOSS(model(x), y).item(), abs=1e-6)
        assert history[-1]["val_accuracy"] == pytest.approx(accuracy(model(x), y).item())
    assert history[0].keys() == {"loss", "accuracy", "val_loss", "val_accuracy"}
    dropping = nn.Sequential(nn.Dropout(1.0), net())
    found = s.evaluate(dropping, DataLoader(dataset(), batch_size=5), loss=LOSS)
    assert found["loss"] == pytest.approx(LOSS(dropping.eval()(x), y).item(), abs=1e-6)
    assert s.evaluate(dropping.train(), (x.numpy(), y.numpy()), loss=LOSS) == pytest.approx(found)
    assert dropping.training


@pytest.mark.parametrize("clip", [None, CLIP])
def test_two_workers_in_step_fit_as_one_process(clip):
    with running_job(workers=2) as job:

        def one(rank):
            with ps_worker.strategy("central_storage", coordinator=job.address, rank=rank, device="cpu") as s:
                return fit(s, clip=clip)

        found = together(lambda: one(0), lambda: one(1))
    assert_fits(found[0], *by_hand(clip=clip))
    assert found[0][0] == found[1][0]


def fit_and_continue(folder: str) -> Any:
    torch.set_num_threads(1)
    with ps_worker.strategy("mirrored", devices="cpu") as s:
        whole = fit(s)
        fit(s, epochs=1, checkpoint=f"{folder}/fit.pt")
        return [whole, fit(s, checkpoint=f"{folder}/fit.pt"), dropped_in_a_fit(s)]


def dropped_in_a_fit(s) -> list[bool]:
    """Which of 64 equal inputs a fit has dropped."""
    seen: list[bool] = []
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1))
    model[0].register_forward_hook(lambda module, given, dropped: seen.extend((dropped == 0).flatten().tolist()))
    torch.manual_seed(7)
    prepared, _ = s.prepare(model, torch.optim.SGD, lr=0.1)
    data = torch.ones(s.replicas, 64), torch.zeros(s.replicas, 1)
    s.fit(prepared, data, loss=nn.functional.mse_loss, batch_size=1, progress=False)
    return seen


def test_two_replicas_fit_as_one_process_continue_from_a_checkpoint_and_drop_different_inputs(tmp_path):
    replicas = Replicas(tmp_path, 2, fit_and_continue, str(tmp_path))
    try:
        values = replicas.values()
        for whole, continued, dropped in values:
            assert_fits(whole, *by_hand())
            assert continued == whole
            assert len(dropped) == 64
        assert values[0][2] != values[1][2]
    finally:
        replicas.close()


def test_parameter_servers_continue_from_a_checkpoint(tmp_path):
    histories = []
    for epochs in (1, 2):
        with (
            running_job() as job,
            ps_worker.strategy("parameter_server", coordinator=job.address, mode="sync", device="cpu") as s,
        ):
            histories.append(fit(s, epochs=epochs, checkpoint=tmp_path / "fit.pt"))
    assert_fits(histories[1], *by_hand())


def test_a_fit_in_step_that_is_continued_in_another_job_has_the_orders_of_one_that_is_not(tmp_path):
    def shuffled(s, epochs, path):
        model, _ = s.prepare(net(), torch.optim.SGD, lr=0.1)
        loader = DataLoader(dataset(), batch_size=8, shuffle=True)
        return s.fit(model, loader, loss=LOSS, epochs=epochs, checkpoint=path, progress=False)

    found = []
    for epochs, path in ((1, tmp_path / "part.pt"), (3, tmp_path / "part.pt"), (3, None)):
        with running_job() as job, ps_worker.strategy("central_storage", coordinator=job.address, device="cpu") as s:
            found.append(shuffled(s, epochs, path))
    continued, whole = ([logs["loss"] for logs in history] for history in found[1:])
    assert continued == pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize("another_job", [False, True])
def test_who_continues_a_fit_of_leased_data_trains_the_epochs_that_the_file_lacks(tmp_path, another_job):
    def trained(job, epochs):
        with ps_worker.strategy("parameter_server", coordinator=job.address, mode="async", device="cpu") as s:
            model, _ = s.prepare(net(), torch.optim.SGD, lr=0.1)
            s.fit(model, DataLoader(dataset(), 8), loss=LOSS, epochs=epochs, checkpoint=tmp_path / "f", progress=False)
            return s._session.progress.totals[1]

    with running_job(workers=0) as job:
        assert trained(job, 2) == 48
        if not another_job:
            assert trained(job, 3) == 24
    if another_job:
        with running_job(workers=0) as job:
            assert trained(job, 3) == 24


def test_a_file_that_is_no_checkpoint_is_a_typed_error(s, tmp_path):
    path = tmp_path / "fit.pt"
    path.write_bytes(b"nothing")
    with pytest.raises(DamagedData, match="cannot be read as a checkpoint"):
        fit(s, checkpoint=path)
    torch.save({"weights": 1}, path)
    with pytest.raises(DamagedData, match="is no checkpoint of fit"):
        fit(s, checkpoint=path)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns(s, precision):
    history, _ = fit(s, epochs=3, precision=precision)
    assert history[-1]["loss"] < history[0]["loss"]


class Record(Callback):
    def __init__(self):
        self.seen = []

    def on_epoch_begin(self, epoch):
        self.seen.append(("begin", epoch))

    def on_step_end(self, step):
        self.seen.append(("step", step))

    def on_epoch_end(self, epoch, logs):
        self.seen.append(("end", epoch, sorted(logs)[0]))


def test_callbacks_are_called_in_order_and_steps_are_limited(s):
    record = Record()
    fit(s, callbacks=[record, Callback()], steps_per_epoch=1)
    assert record.seen == [
        ("begin", 0),
        ("step", 1),
        ("end", 0, "accuracy"),
        ("begin", 1),
        ("step", 2),
        ("end", 1, "accuracy"),
    ]


def test_early_stopping_ends_a_fit_that_does_not_get_better(s):
    assert len(fit(s, epochs=9, callbacks=[EarlyStopping(patience=2, min_delta=100.0)])[0]) == 3


def test_early_stopping_remembers_the_epochs_of_a_checkpoint(s, tmp_path):
    def stopping():
        return [EarlyStopping(patience=3, min_delta=100.0)]

    assert len(fit(s, epochs=2, callbacks=stopping(), checkpoint=tmp_path / "fit.pt")[0]) == 2
    again = stopping()
    assert len(fit(s, epochs=9, callbacks=again, checkpoint=tmp_path / "fit.pt")[0]) == 4
    assert len(fit(s, epochs=9, callbacks=stopping(), checkpoint=tmp_path / "fit.pt")[0]) == 4
    assert len(fit(s, epochs=9, callbacks=again)[0]) == 4


def test_arrays_are_shuffled_batches(s):
    x, y = (tensor.numpy() for tensor in dataset().tensors)
    model, _ = s.prepare(net(), torch.optim.SGD, lr=0.1)
    history = s.fit(model, (x, y), loss=LOSS, batch_size=8, epochs=2, progress=False)
    assert history[1]["loss"] < history[0]["loss"]
    with pytest.raises(ConfigError, match="different numbers of samples; actual: 24, 3"):
        s.fit(model, (x, np.zeros(3)), loss=LOSS)


def test_a_bar_is_shown_where_it_is_asked_for(s, capsys):
    model, _ = s.prepare(net(), torch.optim.SGD, lr=0.1)
    s.fit(model, DataLoader(dataset(), batch_size=8), loss=LOSS, progress=True)
    assert "epoch 0" in capsys.readouterr().err


def test_replicas_are_seeded_apart_for_dropout(s, monkeypatch):
    seeds = []
    monkeypatch.setattr(type(s), "replicas", 2)
    monkeypatch.setattr(s, "seed_replica", seeds.append)
    monkeypatch.setattr(fitting.Fit, "run", lambda self, loader, validation: [])
    model, _ = s.prepare(net(), torch.optim.SGD, lr=0.1)
    s.fit(model, DataLoader(dataset()), loss=LOSS)
    assert seeds == [torch.initial_seed()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "no such epochs; expected: a whole number from 1; actual: 0"),
        ({"accumulate": 1.5}, "no such accumulate"),
        ({"steps_per_epoch": True}, "no such steps_per_epoch"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm is not a norm"),
        ({"precision": "int8"}, "expected: fp32, bf16, fp16; actual: 'int8'"),
        ({"loss": None}, "fit.. has no loss"),
    ],
)
def test_settings_that_do_not_fit_are_refused(s, options, message):
    model, _ = s.prepare(net(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ConfigError, match=message):
        s.fit(model, DataLoader(dataset()), **{"loss": LOSS, **options})


def test_a_model_that_is_not_prepared_or_a_batch_without_a_target_is_refused(s):
    with pytest.raises(ConfigError, match="not prepared"):
        s.fit(net(), DataLoader(dataset()), loss=LOSS)
    model, _ = s.prepare(net(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ConfigError, match="does not know the target"):
        s.fit(model, DataLoader(TensorDataset(torch.zeros(2, 6))), loss=LOSS, progress=False)


def test_batches_are_grouped_and_the_last_group_may_be_shorter():
    assert list(grouped(range(5), 2)) == [[0, 1], [2, 3], [4]]
    assert list(grouped(range(5), 2, 1)) == [[0, 1]]
    assert list(grouped([], 2)) == []
