"""A worker and a shard are killed while a Trainer trains. One whole job."""

import re
from pathlib import Path

import pytest

from tests.cli.launcher.training import Training
from tests.recovery.zygote import shared

SCRIPT = """
import pathlib, select
import torch
from transformers import TrainerCallback, TrainingArguments
from ps_worker.huggingface import PsTrainer


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x, labels):
        scores = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}


class Pause(TrainerCallback):
    def on_step_end(self, args, state, control, **rest):
        if state.global_step == 6:
            print("half-way", flush=True)
            while not pathlib.Path("go").exists():
                select.select([], [], [], 0.01)


torch.manual_seed(0)
data = [{"x": x, "labels": int(x.sum() > 0)} for x in torch.randn(32, 4)]
arguments = TrainingArguments(
    output_dir="out", num_train_epochs=8, learning_rate=0.1, lr_scheduler_type="linear", eval_strategy="epoch",
    save_strategy="epoch", per_device_train_batch_size=4, report_to="none", disable_tqdm=True,
    dataloader_pin_memory=False,
)
trainer = PsTrainer(model=Net(), args=arguments, train_dataset=data, eval_dataset=data[:8], callbacks=[Pause()])
trainer.train()
print("ended at step", trainer.state.global_step, "with", round(trainer.evaluate(data)["eval_loss"], 3), flush=True)
"""


@pytest.mark.long
def test_the_training_ends_when_a_worker_and_a_shard_are_killed_in_the_middle(tmp_path: Path) -> None:
    shared().load("transformers.trainer", "ps_worker.huggingface.trainer")
    flags = ("--workers", "2", "--mode", "sync", "--data-dir", "kept", "--restart-workers", "1")
    job = Training(tmp_path, flags, shared(), SCRIPT)
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
    # The one that was started again has gone on from where the job was: it did not come to step 6 again.
    assert job.output.count("half-way") == 2, job.output
    reached = re.findall(r"ended at step 32 with ([\d.]+)", job.output)
    assert len(reached) == 2, job.output
    assert all(float(loss) < 0.4 for loss in reached), reached
    # Rank 0 alone saves.
    assert len(list(tmp_path.glob("out/checkpoint-32/model.safetensors"))) == 1
