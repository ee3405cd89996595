"""A worker and a shard are killed while ``fit`` trains. A whole job in make test, 8 CPU seconds; else one per mode."""

from pathlib import Path

import pytest
import torch

from tests.cli.launcher.training import Training
from tests.recovery.zygote import shared
from tests.support.length import choose

SCRIPT = """
import pathlib, select
import torch
import ps_worker
from ps_worker.strategies.fit import Callback

CHECKPOINT = {checkpoint!r}


class Pause(Callback):
    def __init__(self, s):
        self.s = s

    def on_fit_begin(self, history):
        print("continues after", len(history), "epochs", flush=True)

    def on_epoch_begin(self, epoch):
        print("epoch", epoch, "at", len(optimizer.param_groups), round(scheduler.get_last_lr()[0], 4), flush=True)

    def on_step_end(self, step):
        if step == 6 and not pathlib.Path("go").exists():
            print("half-way", flush=True)
            while not pathlib.Path("go").exists():
                select.select([], [], [], 0.01)


torch.manual_seed(0)
inputs = torch.randn(64, 4)
targets = (inputs[:, 0] > 0).long()
data = torch.utils.data.TensorDataset(inputs, targets)
with ps_worker.strategy() as s:
    model, optimizer = s.prepare(torch.nn.Linear(4, 2), torch.optim.SGD, lr=0.5, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.9)
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    history = s.fit(
        model, loader, loss=torch.nn.functional.cross_entropy, epochs=4, scheduler=scheduler, validation=loader,
        callbacks=[Pause(s)], checkpoint=CHECKPOINT, progress=False,
    )
    print("ended with", len(history), "epochs, loss", history[-1]["val_loss"], flush=True)
"""

CASES = [("sync", True), ("async", True), ("ssp", True), ("sync", False), ("async", False), ("ssp", False)]


@pytest.mark.parametrize(("mode", "with_checkpoint"), choose(CASES, CASES[:1]))
def test_a_fit_ends_when_a_worker_and_a_shard_are_killed_in_the_middle(tmp_path: Path, mode, with_checkpoint) -> None:
    shared().load("ps_worker.strategies.cluster_strategies")
    flags = ("--strategy", "parameter_server", "--shards", "2", "--workers", "2", "--mode", mode)
    script = SCRIPT.replace("{checkpoint!r}", repr("fit.pt" if with_checkpoint else None))
    job = Training(tmp_path, (*flags, "--data-dir", "kept", "--restart-workers", "1"), shared(), script)
    try:
        # In the middle of the second epoch, of four steps: the first is in the file.
        job.says("half-way")
        job.says("half-way")
        job.kill("worker")
        job.kill("shard")
        # Only then the other goes on: alone it would end this epoch, and the file would have it.
        job.says(f"continues after {int(with_checkpoint)} epochs")
        job.go_on()
        assert job.ends() == 0, job.output
    finally:
        job.close()
    assert job.output.count("starting it again") == 2, job.output
    losses = [float(line.split()[-1]) for line in job.output.splitlines() if "ended with 4 epochs" in line]
    assert len(losses) == 2, job.output
    assert max(losses) < 0.45, job.output
    # The worker that was started again continues in the epoch that the file lacks, or begins with the first.
    assert job.output.count("continues after 1 epochs") == int(with_checkpoint)
    assert job.output.count("epoch 0 at") == (2 if with_checkpoint else 3)
    assert job.output.count("epoch 1 at") == 3
    if with_checkpoint:
        assert job.output.count("epoch 1 at 1 0.45") == 3
        assert len(torch.load(tmp_path / "fit.pt")["history"]) == 4
