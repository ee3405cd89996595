"""The strategy of ``lightning.pytorch.Trainer``."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from ps_worker.cluster import Cluster
from ps_worker.common_values import CommonValues
from ps_worker.connection import note_failure
from ps_worker.lightning.process import TrainerProcess, split_loader
from ps_worker.optimizer import PsOptimizer
from ps_worker.step.remote_model import RemoteModel

_numbers: Iterator[int] = itertools.count()

_EPOCH_BITS = 16
"""Room for epochs in the number of a section."""


class TorchPsStrategy(TrainerProcess, Strategy):
    """The strategy of Lightning's Trainer: ``L.Trainer(strategy="torch_ps")``, or an object of this class.

    The script runs on every worker, which ``ps-run`` starts. The shards run the optimizers of ``configure_optimizers``,
    so schedulers, accumulation and manual optimization work as before. DataLoaders are split among the workers. Methods
    raise PsError.
    """

    def __init__(self, cluster: Cluster | None = None, **adopting: Any) -> None:
        """Keep the settings; the process joins the job when the trainer begins.

        Args:
            cluster: The connection. None: the process joins the job of the environment, and leaves it when it ends.
            **adopting: Arguments of ``Cluster.adopt``, such as ``wire="int8"``.
        """
        Strategy.__init__(self)
        TrainerProcess.__init__(self, cluster, f"lightning-{next(_numbers)}", self._section)
        self._adopting = adopting
        #: Whether the trainer is to split DataLoaders; None until it has begun.
        self._splits: bool | None = None
        #: The clipping norm of the trainer, while the shards clip in its place.
        self._clip_grad_norm: float | None = None
        #: Those of the last fit.
        self._own: list[PsOptimizer] = []
        self._common_values: CommonValues | None = None
        #: How many fits have begun before, and whether this one is in its epochs.
        self._fits = -1
        self._in_epochs = False

    @property
    def is_distributed(self) -> bool:
        """True: metrics with ``sync_dist`` are reduced only where this is so."""
        return True

    def setup_environment(self) -> None:
        """Join the job."""
        if self._trainer.state.fn is TrainerFn.FITTING:
            self._fits += 1
            self._in_epochs = False
        self.join_job()
        super().setup_environment()
        if self._splits is None:
            # With its own sampler the trainer would split the data a second time.
            connector = self._trainer._accelerator_connector
            self._splits, connector.use_distributed_sampler = connector.use_distributed_sampler, False

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return this worker's part of the data; all of it where the trainer has ``use_distributed_sampler=False``."""
        return split_loader(self.cluster, dataloader) if self._splits else dataloader

    def model_to_device(self) -> None:
        """Move the module to the device before its parameters become views of flat memory."""
        assert self.model is not None
        self.model.to(self.root_device)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Build the optimizers, and have the shards run them. Those of an earlier fit are closed."""
        assert self.lightning_module is not None
        close_earlier(self.lightning_module, self._own)
        super().setup_optimizers(trainer)
        adopting = {**self._clipping(trainer, self.lightning_module), **self._adopting}
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        self._own = []
        for optimizer in self.optimizers:
            following = [each for each in schedulers if getattr(each, "optimizer", None) is optimizer]
            self._own.append(self.cluster.adopt(optimizer, self.lightning_module, following, **adopting))
            note_adopted(self._own[-1:])

    def on_train_start(self) -> None:
        """Count collective calls by epochs from now on."""
        self._in_epochs = True

    def teardown(self) -> None:
        """Give the trainer its clipping norm back. What is on the shards stays."""
        if self._clip_grad_norm is not None:
            self._trainer.gradient_clip_val, self._clip_grad_norm = self._clip_grad_norm, None
        super().teardown()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state from the shards on worker 0, which writes it; nothing on others."""
        if not self.is_global_zero:
            return {}
        return (optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer).state_dict()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor, 64 KiB at most, over the workers."""
        return self.reduced(tensor, group, reduce_op)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Make the average that StochasticWeightAveraging sets before its last epoch, where it has one, the cluster's.

        In that epoch it computes the statistics of BatchNorm, with steps that have no gradients.
        """
        if batch_idx or not any(isinstance(each, StochasticWeightAveraging) for each in self._callbacks):
            return
        if models := self._models():
            self._values.settle(models, self._gather, "the epoch")

    def on_train_end(self) -> None:
        """Make what callbacks have set at the end of the training, such as an average of weights, the cluster's."""
        if models := self._models():
            self._values.settle(models, self._gather, "the end of the training")

    def on_validation_start(self) -> None:
        """Have every worker evaluate the same parameters: the newest, or those that were set."""
        self._before_evaluation()

    def on_test_start(self) -> None:
        """Have every worker test the same parameters: the newest, or those that were set."""
        self._before_evaluation()

    def on_predict_start(self) -> None:
        """Have every worker predict with the same parameters: the newest, or those that were set."""
        self._before_evaluation()

    def on_exception(self, exception: BaseException) -> None:
        """Keep the exception as the reason with which this worker leaves."""
        note_failure(exception)

    def _clipping(self, trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, float]:
        """Have the shards clip by norm where the trainer would: of the mean gradient, not of each worker's."""
        norm = trainer.gradient_clip_val
        by_value = trainer.gradient_clip_algorithm == "value"
        if not norm or by_value or is_overridden("configure_gradient_clipping", module):
            return {}
        self._clip_grad_norm, trainer.gradient_clip_val = norm, None
        return {"clip_grad_norm": float(norm)}

    def _before_evaluation(self) -> None:
        in_training = self._trainer.state.fn is TrainerFn.FITTING
        if (in_training or not self._trainer.ckpt_path) and (models := self._models()):
            self._values.before_evaluation(models, self._gather, in_training=in_training)

    def _models(self) -> list[RemoteModel]:
        assert self.lightning_module is not None
        return [model for optimizer in optimizers_of(self.lightning_module) for model in optimizer._models()]

    def _gather(self, value: Any) -> dict[int, Any]:
        assert self._exchanges is not None
        return self._exchanges.gather(value)

    @property
    def _values(self) -> CommonValues:
        if self._common_values is None:
            self._common_values = CommonValues(self.cluster._session)
        return self._common_values

    @property
    def _callbacks(self) -> list[pl.Callback]:
        found: list[pl.Callback] = vars(self._trainer)["callbacks"]
        return found

    def _section(self) -> int:
        """Rises, also where a fit goes on from a checkpoint that is older than what the fit before has reached.

        What is called before the first epoch is the same with a checkpoint and without one: it has its own section.
        """
        epoch = 1 + int(self._trainer.current_epoch) if self._in_epochs else 0
        return (max(0, self._fits) << _EPOCH_BITS) + epoch

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer


_adopted: list[PsOptimizer] = []
"""In the order of their adoption, without those that were closed."""


def note_adopted(optimizers: Iterable[PsOptimizer]) -> None:
    """Remember optimizers that a trainer has adopted."""
    _adopted.extend(optimizers)


def optimizers_of(module: torch.nn.Module) -> list[PsOptimizer]:
    """Return the optimizers in use that train a parameter of ``module``."""
    trained = {id(parameter) for parameter in module.parameters()}
    return [each for each in _adopted if any(id(p) in trained for group in each.param_groups for p in group["params"])]


def close_earlier(module: torch.nn.Module, own: Collection[PsOptimizer]) -> None:
    """Close the optimizers of ``module``, whose parameters get new ones, and ``own``, which a trainer gives up.

    Each waits as ``cluster.barrier()`` does: all workers run the same trainers. Raises PsError.
    """
    ending = optimizers_of(module)
    for optimizer in list(_adopted):
        if any(optimizer is each for each in (*ending, *own)):
            optimizer.close()
            _adopted.remove(optimizer)
