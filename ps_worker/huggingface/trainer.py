"""``transformers.Trainer`` whose optimizer runs on the shards."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import uuid
import warnings
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer_pt_utils import LengthGroupedSampler

from ps_protocol.errors import ConfigError
from ps_protocol.model.spec import Mode
from ps_worker.cluster import Cluster
from ps_worker.common_values import CommonValues
from ps_worker.connection import connected
from ps_worker.data.samples import batch_samples
from ps_worker.huggingface.accelerator import (
    PsAccelerator,
    check_precision,
    over_cluster,
    refuse_files,
    set_process_state,
)
from ps_worker.optimizer import PsOptimizer
from ps_worker.step.remote_model import RemoteModel

_numbers: Iterator[int] = itertools.count()
"""Of the trainers of this process: they have collective calls of their own."""

_NO_FOLDER = ""
"""In the place of a checkpoint's folder, where a worker begins in the middle without one."""


class PsTrainer(Trainer):
    """A ``transformers.Trainer`` for a worker of a job.

    Rank 0 saves, logs and evaluates; the others take its metrics, so that early stopping and the best checkpoint are
    the same everywhere. While rank 0 is away nothing is saved, and the next rank evaluates.
    ``per_device_train_batch_size`` is per worker. Data is split as by ``cluster.shard(even=True)``, in a new order for
    each epoch.
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
        """Join the job of the environment, unless ``cluster`` is given.

        Args:
            model: As in transformers.
            args: As in transformers.
            *positional: As in transformers.
            cluster: The connection. None: the process joins, and leaves the job when it ends.
            optimizer_options: Arguments of ``Cluster.adopt``.
            **named: As in transformers.

        Raises:
            ConfigError: The arguments ask for another kind of distribution, or a dataset is the batches of files.
            PsError: As ``ps_worker.connect``.
        """
        refuse_files([*positional, *named.values()])
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else copy.copy(args)
        self.cluster = connected() if cluster is None else cluster
        self._optimizer_options = dict(optimizer_options)
        #: The one that this trainer has made the cluster's.
        self._adopted: PsOptimizer | None = None
        _check(args)
        check_precision(self.cluster, getattr(args, "mixed_precision", None))
        set_process_state(self.cluster)
        args.__dict__["_setup_devices"] = self.cluster.device
        args._n_gpu = min(args.n_gpu, 1)
        #: Of the exchanges of this training, and how many steps others had made before this worker's first.
        self._first_section = self._ahead = 0
        self._name = f"transformers-{next(_numbers)}"
        self._values = CommonValues(self.cluster._session)
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
        """Return the optimizer of the arguments, or the one given to the constructor, adopted by the cluster.

        One that runs on the shards already is taken as it is.

        Args:
            model: As in transformers.

        Raises:
            UnsupportedOptimizer: Shards cannot run it, as ``optim="adafactor"`` and other classes that are not torch's.
            ConfigError: The optimizer of the cluster does not do what the arguments ask for: clip to ``max_grad_norm``,
                or ``optimizer_options``.
        """
        given = self.optimizer
        self._check_given(given)
        if isinstance(given, AcceleratedOptimizer):
            return given
        schedulers = [self.lr_scheduler] if given is not None and self.lr_scheduler is not None else []
        optimizer = super().create_optimizer(model)
        if not isinstance(optimizer, PsOptimizer):
            whole = self.accelerator.unwrap_model(self.model)
            clip = {"clip_grad_norm": self.args.max_grad_norm} if self.args.max_grad_norm > 0 else {}
            optimizer = self.cluster.adopt(optimizer, whole, schedulers, **clip | self._optimizer_options)
            self._adopted = optimizer
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)
        self.optimizer._is_accelerate_prepared = True
        return self.optimizer

    def _check_given(self, optimizer: Any) -> None:
        """Raises ConfigError where the cluster has an optimizer without what the arguments ask for."""
        inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
        if not isinstance(inner, PsOptimizer):
            return
        if inner is not self._adopted and self._optimizer_options:
            raise ConfigError(
                "optimizer_options are of no effect on an optimizer that is the cluster's already",
                expected="a torch optimizer, or none, beside optimizer_options",
                actual=", ".join(self._optimizer_options),
                remedy="give these options to cluster.optimizer(...) or cluster.adopt(...) itself",
            )
        followed = getattr(self.lr_scheduler, "optimizer", inner)
        if inner is not self._adopted and followed is not inner and followed is not optimizer:
            raise ConfigError(
                "the scheduler is another optimizer's: the learning rate would stay as it is",
                expected="a scheduler made with the optimizer that the trainer is given",
                actual=f"{type(self.lr_scheduler).__name__} of a {type(followed).__name__}",
                remedy="make the scheduler with the optimizer of cluster.optimizer(...) or cluster.adopt(...)",
            )
        asked = self.args.max_grad_norm
        clips = inner.clip_grad_norm
        if "clip_grad_norm" in self._optimizer_options or not asked or asked <= 0 or clips == asked:
            return
        raise ConfigError(
            "the optimizer does not clip gradients as TrainingArguments say",
            expected=f"clip_grad_norm={asked:g}, which is max_grad_norm",
            actual=f"clip_grad_norm={clips}",
            remedy=f"make it with clip_grad_norm={asked:g}, let the trainer adopt a torch optimizer, or set "
            "TrainingArguments(max_grad_norm=0)",
        )

    def _clip_grad_norm(self, model: Any) -> Any:
        # A subclass may have made the optimizer.
        self._check_given(self.optimizer)
        # The shards clip, after the mean over the workers; here the norm is found for the log.
        return self.accelerator.clip_grad_norm_(model.parameters(), math.inf)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return this worker's part of the training data."""
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

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, *rest: Any
    ) -> tuple[int, int]:
        """As in transformers; a worker that comes to a training under way begins at the step where the others are."""
        before = self._section()
        began, skipped = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *rest)
        self._first_section = before + 1
        self.create_optimizer()
        # What was set since the last training.
        self._values.settle(self._models(), self._gather_at_first, "the training")
        self._ahead = self._steps_of_others(max_steps)
        if not self._ahead:
            return began, skipped
        self.state.global_step += self._ahead
        if self.state.global_step >= max_steps:
            return num_train_epochs, 0
        began, steps = divmod(self.state.global_step, num_update_steps_per_epoch)
        return began, 0 if self.args.ignore_data_skip else steps * self.args.gradient_accumulation_steps

    def _steps_of_others(self, max_steps: int) -> int:
        """How many steps the others have made beyond this worker's first; 0 where all begin together."""
        version, step = self.optimizer.optimizer.version, self.state.global_step
        own = {"version": version, "step": step, "process": uuid.uuid4().hex}
        # In a training that has begun, these are the values of those who began it.
        found = self._gather_at_first(own)
        if found.get(self.cluster.rank) == own:
            return 0
        in_sync = self.cluster._session.consistency.mode is Mode.SYNC
        running = running_step(version, found[min(found)], 1 if in_sync else len(found))
        return max(0, min(running, max_steps) - step)

    def _prepare_for_training(self, *arguments: Any) -> Any:
        prepared = super()._prepare_for_training(*arguments)
        advance(self.lr_scheduler, self._ahead)
        return prepared

    def _run_epoch(self, *arguments: Any, **named: Any) -> None:
        # Without a checkpoint transformers skips no batches.
        if self._ahead and named.get("resume_from_checkpoint") is None:
            named["resume_from_checkpoint"] = _NO_FOLDER
        super()._run_epoch(*arguments, **named)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint != _NO_FOLDER:
            super()._load_rng_state(checkpoint)

    def _finalize_training(self, *arguments: Any) -> Any:
        """As in transformers; then what was set at the end, such as the best model, is that of all workers."""
        output = super()._finalize_training(*arguments)
        self._values.settle(self._models(), self._gather, "the end of the training")
        return output

    def _section(self) -> int:
        """Rises with every step, over all trainings: a worker that begins in the middle counts its calls from there."""
        return self._first_section + int(self.state.global_step)

    def get_batch_samples(self, *arguments: Any) -> tuple[list[Any], Any]:
        """As in transformers. The push of these batches weighs their tokens where the loss is per token, else their
        samples.

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
        """Evaluate on one worker, and return its metrics on all.

        It evaluates the newest parameters, or those that were set. Outside of a training, values that were set
        differently on other workers are replaced by those of the lowest rank. The evaluating worker is the lowest rank
        that is there.

        Args:
            eval_dataset: As in transformers.
            ignore_keys: As in transformers.
            metric_key_prefix: As in transformers.
        """
        refuse_files([eval_dataset])
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, dict):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        while True:
            if self.is_in_train:
                evaluator = min(self._gather(None))
            else:
                evaluator = min(self._values.before_evaluation(self._models(), self._gather, in_training=False))
            own: dict[str, float] | None = None
            if evaluator == self.cluster.rank:
                if self.is_in_train:
                    self._pull()
                own = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            found = self._gather(own)
            if evaluator in found:
                break
        metrics: dict[str, float] = found[evaluator]
        if own is None:
            self.log(dict(metrics))
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def log(self, logs: dict[str, float], *arguments: Any) -> None:
        """As in transformers; the numbers also go to the progress display, page and curves of the job."""
        super().log(logs, *arguments)
        self.cluster.report(**{name: value for name, value in logs.items() if isinstance(value, int | float)})

    def _save_checkpoint(self, *arguments: Any) -> None:
        if self.is_world_process_zero():
            self._pull()
        super()._save_checkpoint(*arguments)
        if self.args.load_best_model_at_end:
            best = self.state.best_model_checkpoint
            found = self._gather(best)
            self.state.best_model_checkpoint = found.get(0, best)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            # One worker sends the state; the others wait for it.
            self._gather_at_first(None)

    def _pull(self) -> None:
        """Take the newest parameters, unless some were set here since the last step: then this worker's stay."""
        models = self._models()
        if not any(model.set_values(with_buffers=False) for model in models):
            for model in models:
                model.pull()

    def _models(self) -> list[RemoteModel]:
        inner = getattr(self.optimizer, "optimizer", None)
        return inner._models() if isinstance(inner, PsOptimizer) else []

    def _gather_at_first(self, value: Any) -> dict[int, Any]:
        """In the section of the first step, whatever step this worker begins with."""
        return self.cluster.gather_values(value, name=self._name, section=self._first_section)

    def _gather(self, value: Any) -> dict[int, Any]:
        return self.cluster.gather_values(value, name=self._name, section=self._section())


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


def running_step(version: int, first: Mapping[str, int], updates_per_step: int) -> int:
    """Return the optimizer step at which the others are, when the model has ``version``.

    ``first`` has the "version" of the model and the "step" with which the training began. A step of all workers is one
    update in sync, else one per worker.
    """
    return first["step"] + max(0, version - first["version"]) // updates_per_step


def advance(scheduler: Any, steps: int) -> None:
    """Advance a scheduler by ``steps`` optimizer steps; one that looks at metrics stays as it is."""
    if "metrics" in inspect.signature(scheduler.step).parameters:
        return
    with warnings.catch_warnings():
        # That the optimizer has made no step: here it has not, on the shards it has.
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(steps):
            scheduler.step()
