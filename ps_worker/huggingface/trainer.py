"""``transformers.Trainer`` whose optimizer runs on the shards."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer_pt_utils import LengthGroupedSampler

from ps_protocol.errors import ConfigError
from ps_worker.cluster import Cluster
from ps_worker.data.samples import batch_samples
from ps_worker.huggingface.accelerator import PsAccelerator, over_cluster
from ps_worker.huggingface.place import connected, take_place
from ps_worker.optimizer import PsOptimizer

_NAME = "transformers"
"""Name of the collective calls."""


class PsTrainer(Trainer):
    """A ``Trainer`` for a worker of a job. Its arguments are those of ``Trainer``, and two more.

    ``cluster`` is the connection; without it the constructor joins the job of the environment, and the process leaves
    it at its end. ``optimizer_options`` are options of ``Cluster.adopt``.

    Rank 0 saves, logs and evaluates; the others take its metrics, so that early stopping and the best checkpoint are
    the same everywhere. While it is away nothing is saved, and the next rank evaluates.
    ``per_device_train_batch_size`` is per worker. Data is split as ``cluster.shard(even=True)`` does, in a new order
    for each epoch.
    """

    accelerator: PsAccelerator
    optimizer: Any
    control: Any

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        cluster: Cluster | None = None,
        optimizer_options: Mapping[str, Any] = MappingProxyType({}),
        **named: Any,
    ) -> None:
        """Raises what ``connect`` raises, and ConfigError for arguments that ask for another kind of distribution."""
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else copy.copy(args)
        self.cluster = connected() if cluster is None else cluster
        self._optimizer_options = dict(optimizer_options)
        _check(args)
        take_place(self.cluster)
        args.__dict__["_setup_devices"] = self.cluster.device
        args._n_gpu = min(args.n_gpu, 1)
        # Here the weight of a push makes the mean one over all tokens; the loss is not scaled for it.
        self._weighs = args.average_tokens_across_devices
        args.average_tokens_across_devices = False
        super().__init__(model, args, *positional, **named)
        # Dropout differs between workers.
        set_seed(args.seed + self.cluster.rank)

    def create_accelerator_and_postprocess(self) -> None:
        """As in transformers, with a ``PsAccelerator``."""
        super().create_accelerator_and_postprocess()
        self.accelerator = over_cluster(self.accelerator, self.cluster, self._optimizer_options)
        self.accelerator.splits_data = False

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimizer of the arguments, or the one given to the constructor, adopted by the cluster.

        Raises what ``Cluster.adopt`` raises: UnsupportedOptimizer for ``optim="adafactor"`` and other classes that are
        not torch's.
        """
        given = self.optimizer
        if isinstance(given, AcceleratedOptimizer):
            return given
        schedulers = [self.lr_scheduler] if given is not None and self.lr_scheduler is not None else []
        optimizer = super().create_optimizer(model)
        if not isinstance(optimizer, PsOptimizer):
            whole = self.accelerator.unwrap_model(self.model)
            clip = {"clip_grad_norm": self.args.max_grad_norm} if self.args.max_grad_norm > 0 else {}
            optimizer = self.cluster.adopt(optimizer, whole, schedulers, **clip | self._optimizer_options)
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)
        self.optimizer._is_accelerate_prepared = True
        return self.optimizer

    def _clip_grad_norm(self, model: Any) -> Any:
        # The shards clip, after the mean over the workers; here the norm is found for the log.
        return self.accelerator.clip_grad_norm_(model.parameters(), math.inf)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Give this worker's part of the training data."""
        self.accelerator.splits_data = True
        try:
            return super().get_train_dataloader()
        finally:
            self.accelerator.splits_data = False

    def _get_train_sampler(self, *arguments: Any) -> Any:
        sampler = super()._get_train_sampler(*arguments)
        if isinstance(sampler, LengthGroupedSampler):
            # All workers have to draw the same order.
            sampler.generator = torch.Generator().manual_seed(self.cluster.seed % 2**63)
        return sampler

    def get_batch_samples(self, *arguments: Any) -> tuple[list[Any], Any]:
        """As in transformers; the push of these batches weighs their tokens where the loss is per token, else samples.

        With ``average_tokens_across_devices=False`` every push weighs the same.
        """
        batches, items = super().get_batch_samples(*arguments)
        if self._weighs:
            size = sum(map(batch_samples, batches)) if items is None else float(items)
            self.optimizer.weight = size or None
        return batches, items

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """One worker evaluates the newest parameters on all the data; the others wait for its metrics.

        It is the lowest rank of those that are there: rank 0, or the next one where that has left or was lost.
        """
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, dict):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        while True:
            evaluator = min(self.cluster.gather_values(None, name=_NAME))
            own: dict[str, float] | None = None
            if evaluator == self.cluster.rank:
                self._pull()
                own = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            found = self.cluster.gather_values(own, name=_NAME)
            if evaluator in found:
                break
        metrics: dict[str, float] = found[evaluator]
        if own is None:
            self.log(dict(metrics))
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def log(self, logs: dict[str, float], *arguments: Any) -> None:
        """As in transformers; the numbers also go to the job's progress display, page and curves."""
        super().log(logs, *arguments)
        self.cluster.report(**{name: value for name, value in logs.items() if isinstance(value, int | float)})

    def _save_checkpoint(self, *arguments: Any) -> None:
        if self.is_world_process_zero():
            self._pull()
        super()._save_checkpoint(*arguments)
        if self.args.load_best_model_at_end:
            self.state.best_model_checkpoint = self.cluster.broadcast(self.state.best_model_checkpoint, name=_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            # One worker sends the state; the others wait for it.
            self.cluster.barrier()

    def _pull(self) -> None:
        inner = getattr(self.optimizer, "optimizer", None)
        if isinstance(inner, PsOptimizer):
            inner.pull()


def _check(args: TrainingArguments) -> None:
    """Raises ConfigError for arguments that ask for another kind of distribution."""
    asked = {
        "deepspeed": args.deepspeed,
        "fsdp": getattr(args, "fsdp_plugin_args", None),
        "parallelism_config": getattr(args, "parallelism_config", None),
        "auto_find_batch_size": args.auto_find_batch_size,
        "train_sampling_strategy": args.train_sampling_strategy == "batch_rebalance",
    }
    for name, value in asked.items():
        if value:
            raise ConfigError(
                f"PsTrainer cannot train with {name}",
                expected="one device per worker, a batch size and a sampler",
                actual=f"{name}={getattr(args, name, value)!r}",
                remedy=f"leave {name} out of TrainingArguments",
            )
