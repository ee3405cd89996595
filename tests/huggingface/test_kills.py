"""A worker and a shard are killed while a Trainer trains. One whole job."""

from pathlib import Path

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
data = [{"x": torch.randn(4), "labels": i % 2} for i in range(32)]
arguments = TrainingArguments(
    output_dir="out", num_train_epochs=4, per_device_train_batch_size=4, eval_strategy="epoch", save_strategy="epoch",
    report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
)
trainer = PsTrainer(model=Net(), args=arguments, train_dataset=data, eval_dataset=data[:8], callbacks=[Pause()])
trainer.train()
print("ended at step", trainer.state.global_step, flush=True)
"""


def test_the_training_ends_when_a_worker_and_a_shard_are_killed_in_the_middle(tmp_path: Path) -> None:
    for module in ("transformers.trainer", "ps_worker.huggingface.trainer"):
        shared().load(module)
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
    assert job.output.count("ended at step 16") == 2, job.output
    # Rank 0 alone saves.
    assert len(list(tmp_path.glob("out/checkpoint-16/model.safetensors"))) == 1
