"""A worker and a shard are killed while a LightningModule trains. One whole job, two at full length; one costs 8 s.

The worker that is started again runs its script from the beginning, or from the last checkpoint.
"""

from pathlib import Path

import pytest

from tests.cli.launcher.training import Training
from tests.recovery.zygote import shared
from tests.support.length import choose

SCRIPT = """
import pathlib, select
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
import ps_worker.lightning
from tests.lightning.modules import Classifier, loader, trainer


class Pause(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 2:
            print("half-way", flush=True)
            while not pathlib.Path("go").exists():
                select.select([], [], [], 0.01)


saving = ModelCheckpoint("saved", monitor="val_loss", save_last=True)
callbacks = [Pause(), EarlyStopping("val_loss", patience=9), saving]
fitting = trainer(pathlib.Path(), "torch_ps", 6, callbacks)
module = Classifier()
fitting.fit(module, loader(4), loader(4, 24, 2), ckpt_path=CKPT_PATH)
print("ended at epoch", fitting.current_epoch, "with", module.loss(loader(96).dataset.tensors).item(), flush=True)
"""


@pytest.mark.parametrize("ckpt_path", choose([None, "last"], ["last"]))
@pytest.mark.early
def test_the_fit_ends_when_a_worker_and_a_shard_are_killed_in_the_middle(tmp_path: Path, ckpt_path: str | None) -> None:
    shared().load("tests.lightning.modules", "ps_worker.lightning")
    flags = ("--workers", "2", "--mode", "sync", "--data-dir", "kept", "--restart-workers", "1")
    job = Training(tmp_path, flags, shared(), SCRIPT.replace("CKPT_PATH", repr(ckpt_path)))
    try:
        job.says("half-way")
        job.says("half-way")
        job.kill("worker")
        job.kill("shard")
        job.go_on()
        assert job.ends() == 0, job.output
    finally:
        job.close()
    assert job.output.count("starting it again") == 2, job.output
    assert job.output.count("ended at epoch 6 with 0.") == 2, job.output
    assert job.output.count("Restored all states") == (ckpt_path == "last"), job.output
    assert list(tmp_path.rglob("*.ckpt"))
