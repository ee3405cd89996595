"""Mixed precision of Accelerate and of the Trainer over the only worker of a job. Costs 3 s of CPU time."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from ps_protocol.errors import ConfigError
from ps_worker import Cluster
from ps_worker.huggingface import PsAccelerator
from ps_worker.huggingface.accelerator import WeighedOptimizer
from tests.huggingface.test_refused import cluster, made

__all__ = ["cluster"]


class Scores(torch.nn.Module):
    """A model as the Trainer takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.layer(x)
        self.computed_in = scores.dtype
        return {"loss": torch.nn.functional.cross_entropy(scores.float(), labels), "logits": scores}


def test_fp16_on_the_cpu_is_refused_with_what_to_use(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import TrainingArguments

    from ps_worker.huggingface import PsTrainer

    with pytest.raises(ConfigError, match=r"fp16 on the CPU.*remedy: use bf16"):
        PsAccelerator(cluster, mixed_precision="fp16")
    arguments = TrainingArguments(output_dir=str(tmp_path), fp16=True, report_to="none", use_cpu=True)
    with pytest.raises(ConfigError, match=r"fp16 on the CPU.*remedy: use bf16"):
        PsTrainer(model=Scores(), args=arguments, cluster=cluster)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ConfigError, match=r"fp16 on the CPU.*remedy: use bf16"):
        PsAccelerator(cluster)


def test_a_trainer_computes_in_bf16_and_steps_in_float32_without_a_warning(cluster: Cluster, tmp_path: Path) -> None:
    from transformers import TrainingArguments

    from ps_worker.huggingface import PsTrainer

    model = Scores()
    before = model.layer.weight.detach().clone()
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        bf16=True,
        use_cpu=True,
        max_steps=3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    data = [{"x": torch.ones(3) * number, "labels": number % 2} for number in range(8)]
    trainer = PsTrainer(model=model, args=arguments, train_dataset=data, cluster=cluster)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.train()
        # Once more, with the same optimizer, from step 0.
        trainer.train()
    assert (trainer.state.global_step, trainer.optimizer.optimizer.version) == (3, 6)
    assert model.computed_in is torch.bfloat16
    assert model.layer.weight.dtype is torch.float32
    assert not torch.equal(model.layer.weight, before)


def test_a_scaled_gradient_is_unscaled_before_its_push_and_an_infinite_one_is_no_step(cluster: Cluster) -> None:
    PsAccelerator(cluster)
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    wrapped = WeighedOptimizer(cluster.adopt(optimizer, model), scaler)
    reference = torch.nn.Linear(3, 1)
    reference.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)

    def step(factor: float) -> None:
        wrapped.zero_grad()
        scaler.scale(model(torch.ones(2, 3)).sum() * factor).backward()
        wrapped.step()

    step(1.0)
    reference(torch.ones(2, 3)).sum().backward()
    plain.step()
    assert not wrapped.step_was_skipped
    torch.testing.assert_close(model.weight, reference.weight, rtol=0, atol=0)
    step(float("inf"))
    assert wrapped.step_was_skipped
    assert scaler.get_scale() == 512.0
    torch.testing.assert_close(model.weight, reference.weight, rtol=0, atol=0)
    step(1.0)
    assert not wrapped.step_was_skipped
