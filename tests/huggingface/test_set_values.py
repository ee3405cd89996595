"""Weights that are set in or after a training of PsTrainer are those that are evaluated, on every worker.

Two whole jobs, four at full length; one costs 4 s of CPU time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli import forked
from tests.recovery.zygote import shared
from tests.support.length import few

SCRIPT = """
import torch
from transformers import TrainerCallback, TrainingArguments
from ps_worker.huggingface import PsTrainer
from tests.huggingface.test_mixed_precision import Scores


class Average(TrainerCallback):
    \"\"\"Sets an average of the parameters at the end of the training, as a callback for EMA does.\"\"\"

    def __init__(self):
        self.average = None

    def on_step_end(self, args, state, control, model, **rest):
        now = [p.detach().clone() for p in model.parameters()]
        self.average = [0.8 * a + 0.2 * p for a, p in zip(self.average or now, now)]

    @torch.no_grad()
    def on_train_end(self, args, state, control, model, **rest):
        for parameter, average in zip(model.parameters(), self.average):
            parameter.copy_(average)


class Swapping(PsTrainer):
    \"\"\"Evaluates an average in the middle of the training, and puts the trained values back.\"\"\"

    @torch.no_grad()
    def evaluate(self, *arguments, **named):
        if not self.is_in_train:
            return super().evaluate(*arguments, **named)
        own = values(self.model)
        self.model.load_state_dict({name: 0.5 * value for name, value in own.items()})
        found = super().evaluate(*arguments, **named)
        assert same(self.model, {name: 0.5 * value for name, value in own.items()}), "the average was not kept"
        self.model.load_state_dict(own)
        return found


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(model, wanted):
    return all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


def alike(trainer):
    \"\"\"Whether all workers have the same parameters.\"\"\"
    flat = torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()])
    return all(torch.equal(flat, other) for other in trainer.cluster.all_gather(flat, name="test"))


data = [{"x": x, "labels": int(x.sum() > 0)} for x in torch.randn(32, 3, generator=torch.Generator().manual_seed(1))]


def made(kind=PsTrainer, callbacks=(), **more):
    arguments = TrainingArguments(
        output_dir="out", num_train_epochs=3, learning_rate=0.1, eval_strategy="epoch", report_to="none",
        per_device_train_batch_size=4, use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
        **{"save_strategy": "no"} | more)
    torch.manual_seed(0)
    return kind(model=Scores(), args=arguments, train_dataset=data, eval_dataset=data[:8], callbacks=list(callbacks))


def loss_of(model):
    with torch.no_grad():
        return model(torch.stack([each["x"] for each in data[:8]]), torch.tensor([each["labels"] for each in data[:8]]))


average = Average()
trainer = made(callbacks=[average])
# Before there is an optimizer.
assert abs(trainer.evaluate()["eval_loss"] - loss_of(trainer.model)["loss"].item()) < 1e-5
trainer.train()
assert alike(trainer), "the average is another on this rank"
if trainer.is_world_process_zero():
    assert all(map(torch.equal, trainer.model.parameters(), average.average)), "the average is lost"
set_values = values(trainer.model)
found = trainer.evaluate()["eval_loss"]
assert abs(found - loss_of(trainer.model)["loss"].item()) < 1e-5, "other weights were evaluated"
assert same(trainer.model, set_values) and alike(trainer)
# Set alike on all ranks, and on the lowest alone.
for where in ("all", "lowest"):
    if where == "all" or trainer.is_world_process_zero():
        trainer.model.load_state_dict({name: 0.25 * value for name, value in values(trainer.model).items()})
    found = trainer.evaluate()["eval_loss"]
    assert alike(trainer), where
    assert abs(found - loss_of(trainer.model)["loss"].item()) < 1e-5, where
    factor = 0.25 if where == "all" else 0.0625
    assert same(trainer.model, {name: factor * value for name, value in set_values.items()})
# What was set is trained on.
trainer.args.num_train_epochs = 1
trainer.train()
assert alike(trainer)
trainer.optimizer.optimizer.close()

trainer = made(Swapping)
trainer.train()
assert alike(trainer)
trainer.optimizer.optimizer.close()

# The first evaluation has the highest loss.
best = {"save_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
trainer = made(**best, greater_is_better=True)
trainer.train()
assert alike(trainer)
found = trainer.evaluate()["eval_loss"]
assert abs(found - trainer.state.best_metric) < 1e-5, "the best model is lost"
print("all is kept", flush=True)
"""


@pytest.mark.parametrize("mode", few(["sync", "async", "ssp"]))
def test_weights_that_are_set_are_evaluated_and_are_those_of_every_worker(tmp_path: Path, mode: str) -> None:
    shared().load("transformers.trainer", "ps_worker.huggingface.trainer")
    (tmp_path / "script.py").write_text(SCRIPT)
    flags = ("--no-progress", "--seed", "1", "--mode", mode, "--shards", "2", "--workers", "2")
    done = forked.run(tmp_path, *flags, "script.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all is kept") == 2, done.stdout
    assert "was set" not in done.stderr, done.stderr
