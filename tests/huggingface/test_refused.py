"""What PsTrainer and PsAccelerator refuse, each with one typed error; loaders and schedulers as they prepare them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader, TensorDataset

from ps_protocol.errors import ConfigError, UnsupportedOptimizer
from ps_worker import Cluster, files
from ps_worker.huggingface import PsAccelerator
from ps_worker.optimizer import PsOptimizer
from tests.worker.data.files.made import parquet
from tests.worker.jobs import running_job, together


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """The only worker of a job; Accelerate's state is put back."""
    with running_job(1, 1) as job, job.cluster(rank=0) as joined:
        yield joined
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_an_optimizer_without_its_model_is_refused(cluster: Cluster) -> None:
    accelerator = PsAccelerator(cluster)
    with pytest.raises(ConfigError, match="without the module"):
        accelerator.prepare(made()[1])
    with pytest.raises(ConfigError, match="without the module"):
        accelerator.prepare_optimizer(made()[1])


def test_accelerate_alone_refuses_an_optimizer_of_the_cluster(cluster: Cluster) -> None:
    model, optimizer = made()
    adopted = cluster.adopt(optimizer, model)
    with pytest.raises(UnsupportedOptimizer, match="PsAccelerator"):
        Accelerator().prepare(model, adopted)


def test_a_process_group_is_refused(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError, match="LOCAL_RANK"):
        PsAccelerator(cluster)
    assert not torch.distributed.is_initialized()
    assert not PartialState._shared_state


def test_an_accumulation_is_one_step_of_optimizer_and_scheduler(cluster: Cluster) -> None:
    accelerator = PsAccelerator(cluster, gradient_accumulation_steps=2)
    model, optimizer = made()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = DataLoader(TensorDataset(torch.ones(8, 3)), batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    assert (accelerator.num_processes, accelerator.process_index, accelerator.is_main_process) == (1, 0, True)
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert optimizer.optimizer.version == 2
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**2)
    assert not optimizer.step_was_skipped
    assert accelerator.gather(torch.ones(2)).tolist() == [1, 1]
    assert accelerator.reduce(torch.ones(2), "mean").tolist() == [1, 1]
    assert accelerator.reduce(torch.ones(1), "none").tolist() == [1]
    accelerator.wait_for_everyone()


def test_a_loader_that_the_cluster_has_split_is_refused(cluster: Cluster) -> None:
    accelerator = PsAccelerator(cluster)
    data = TensorDataset(torch.ones(8, 3))
    for loader in (cluster.shard(DataLoader(data, batch_size=2)), DataLoader(cluster.shard(data), batch_size=2)):
        with pytest.raises(ConfigError, match="split among the workers already"):
            accelerator.prepare(loader)


def test_the_batches_of_files_are_refused_with_what_to_do(cluster: Cluster, tmp_path: Path) -> None:
    from transformers import TrainingArguments

    from ps_worker.huggingface import PsTrainer

    parquet(tmp_path / "rows.parquet", range(9))
    arguments = TrainingArguments(output_dir=str(tmp_path / "out"), report_to="none", use_cpu=True)
    for batches in (files.read(tmp_path, batch_size=4), cluster.files(tmp_path, batch_size=4)):
        with pytest.raises(ConfigError, match=r"files.*load_dataset"):
            PsAccelerator(cluster).prepare(*made(), batches)
        with pytest.raises(ConfigError, match=r"files.*load_dataset"):
            PsTrainer(model=made()[0], args=arguments, train_dataset=batches, cluster=cluster)
        trainer = PsTrainer(model=made()[0], args=arguments, cluster=cluster)
        with pytest.raises(ConfigError, match=r"files.*load_dataset"):
            trainer.evaluate(batches)


def test_nothing_of_the_optimizers_state_travels_at_prepare(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def travels(*arguments: object) -> None:
        raise AssertionError("the state was asked for")

    for name in ("state_dict", "load_state_dict", "pull"):
        monkeypatch.setattr(PsOptimizer, name, travels)
    _, optimizer = PsAccelerator(cluster).prepare(*made())
    assert isinstance(optimizer.optimizer, PsOptimizer)


def test_a_trainer_has_the_rank_and_the_size_of_the_job(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    from ps_worker.huggingface import PsTrainer

    found = {}
    with running_job(1, 2) as job:
        for rank, cluster in enumerate(together(lambda: job.cluster(rank=0), lambda: job.cluster(rank=1))):
            arguments = TrainingArguments(
                output_dir=str(tmp_path),
                per_device_train_batch_size=3,
                gradient_accumulation_steps=2,
                report_to="none",
                use_cpu=True,
            )
            data = [{"x": torch.ones(1)}] * 24
            trainer = PsTrainer(model=made()[0], args=arguments, train_dataset=data, cluster=cluster)
            args = trainer.args
            found[rank] = trainer.is_world_process_zero(), args.should_save, args.should_log
            assert (args.world_size, args.process_index) == (2, rank)
            assert trainer.get_total_train_batch_size(args) == 12
            assert len(trainer.get_train_dataloader()) == 4
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    assert found == {0: (True, True, True), 1: (False, False, False)}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("auto_find_batch_size", {"auto_find_batch_size": True}),
        ("train_sampling_strategy", {"train_sampling_strategy": "batch_rebalance"}),
    ],
)
def test_arguments_of_other_kinds_of_distribution_are_refused(
    cluster: Cluster, tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    from transformers import TrainingArguments

    from ps_worker.huggingface import PsTrainer

    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", **changes)
    with pytest.raises(ConfigError, match=name) as raised:
        PsTrainer(model=made()[0], args=arguments, cluster=cluster)
    assert raised.value.remedy


def test_an_optimizer_that_shards_do_not_run_is_refused_by_its_name(cluster: Cluster, tmp_path: Path) -> None:
    from transformers import TrainingArguments

    from ps_worker.huggingface import PsTrainer

    arguments = TrainingArguments(output_dir=str(tmp_path), optim="adafactor", report_to="none", use_cpu=True)
    trainer = PsTrainer(model=made()[0], args=arguments, cluster=cluster)
    with pytest.raises(UnsupportedOptimizer, match="Adafactor"):
        trainer.create_optimizer()


def scored(tmp_path: Path, cluster: Cluster, given: Any, *, options: Any = None, **arguments: Any) -> Any:
    """A trainer of one step with a gradient of about 100, and the optimizer ``given`` for its model."""
    from transformers import TrainingArguments

    from ps_worker.huggingface import PsTrainer
    from tests.huggingface.test_mixed_precision import Scores

    model = Scores()
    data = [{"x": torch.full((3,), 100.0), "labels": n % 2} for n in range(8)]
    optimizer = given(model)
    return PsTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=1,
            report_to="none",
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **arguments,
        ),
        train_dataset=data,
        cluster=cluster,
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
        optimizer_options=options or {},
    )


def moved(trainer: Any) -> float:
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    return torch.cat([(p - b).flatten() for p, b in zip(trainer.model.parameters(), before, strict=True)]).norm().item()


def test_an_optimizer_of_the_cluster_clips_as_the_arguments_say_or_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    def declared(**options: Any) -> Any:
        return lambda model: cluster.optimizer(torch.optim.SGD, model, lr=1.0, **options)

    def adopted(model: torch.nn.Module) -> Any:
        return cluster.adopt(torch.optim.SGD(model.parameters(), lr=1.0), model)

    for given in (declared(), adopted, declared(clip_grad_norm=5.0)):
        trainer = scored(tmp_path, cluster, given, max_grad_norm=0.001)
        with pytest.raises(ConfigError, match=r"does not clip.*expected: clip_grad_norm=0\.001.*max_grad_norm=0"):
            trainer.train()
    with pytest.raises(ConfigError, match=r"no effect.*wire"):
        scored(tmp_path, cluster, adopted, max_grad_norm=0, options={"wire": "bf16"}).train()
    trainer = scored(tmp_path, cluster, adopted, max_grad_norm=0)
    trainer.lr_scheduler.optimizer = torch.optim.SGD(trainer.model.parameters())
    with pytest.raises(ConfigError, match=r"another optimizer's.*ConstantLR of a SGD"):
        trainer.train()
    assert moved(scored(tmp_path, cluster, declared(clip_grad_norm=0.001), max_grad_norm=0.001)) < 0.0011
    assert moved(scored(tmp_path, cluster, adopted, max_grad_norm=0)) > 1
    # A torch optimizer is adopted with what the arguments say.
    trainer = scored(tmp_path, cluster, lambda model: torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=0.001)
    assert moved(trainer) < 0.0011
    trainer.args.max_grad_norm = 0.1
    with pytest.raises(ConfigError, match="does not clip"):
        trainer.train()


def test_an_optimizer_that_a_subclass_makes_is_held_to_the_arguments(cluster: Cluster, tmp_path: Path) -> None:
    from ps_worker.huggingface import PsTrainer

    trainer = scored(tmp_path, cluster, lambda model: torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=0.001)

    class Own(PsTrainer):
        def create_optimizer(self, model: Any = None) -> Any:
            if type(self.optimizer) is torch.optim.SGD:
                made = self.cluster.adopt(self.optimizer, self.model)
                self.optimizer = self.accelerator.prepare_optimizer(made)
                self.optimizer._is_accelerate_prepared = True
            return self.optimizer

    trainer.__class__ = Own
    with pytest.raises(ConfigError, match="does not clip"):
        trainer.train()


def test_accelerate_leaves_clipping_to_the_shards_or_says_what_it_clips(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = PsAccelerator(cluster, optimizer_options={"clip_grad_norm": 0.5})
    model, optimizer = accelerator.prepare(*made())
    before = model.weight.detach().clone(), model.bias.detach().clone()
    accelerator.backward(100 * model(torch.ones(2, 3)).sum())
    assert accelerator.clip_grad_norm_(model.parameters(), 0.5).item() == pytest.approx(400)
    for wrong in ({"max_norm": 0.25}, {"max_norm": 0.5, "norm_type": 1}):
        with pytest.raises(ConfigError, match="shards clip gradients already"):
            accelerator.clip_grad_norm_(model.parameters(), **wrong)
    optimizer.step()
    after = torch.cat([model.weight.flatten() - before[0].flatten(), model.bias - before[1]])
    assert after.norm().item() == pytest.approx(0.1 * 0.5, rel=1e-5)
    alone = PsAccelerator(cluster)
    model, _ = alone.prepare(*made())
    alone.backward(100 * model(torch.ones(2, 3)).sum())
    monkeypatch.setattr(Cluster, "world_size", 2)
    for _ in range(2):
        alone.clip_grad_norm_(model.parameters(), 0.5)
        assert torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item() == pytest.approx(0.5, rel=1e-4)
    assert caplog.text.count("clips the gradients of each worker, before their mean") == 1
