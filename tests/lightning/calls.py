"""What strategies answer to single calls, and what they refuse. Asserted in the processes that run it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch.distributed import ReduceOp

from ps_protocol.errors import ConfigError, InvalidRequest
from ps_worker import files
from ps_worker.lightning import TorchPsFabricStrategy, TorchPsStrategy
from ps_worker.lightning.process import join_once
from tests.lightning.modules import Classifier, loader, network, trainer
from tests.worker.data.files.made import parquet


class Failing(Classifier):
    """Ends its run with an error."""

    def training_step(self, batch: Sequence[torch.Tensor], batch_idx: int) -> torch.Tensor:
        raise ValueError("planned")


class Counted(Classifier):
    """Keeps the ids of the rows that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[int] = []
        self.evaluated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trained += batch["id"].tolist()
        return self.net(batch["x"][:, None].expand(-1, 6).double()).mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated += batch["id"].tolist()
        self.log("val_loss", batch["x"].mean(), sync_dist=True)


def as_evaluator(folder: Path) -> dict[str, Any]:
    """An evaluator is refused."""
    with pytest.raises(ConfigError, match=r"an evaluator cannot run a trainer.*cluster.follow"):
        Fabric(accelerator="cpu", devices=1, strategy="torch_ps").launch()
    return {}


def fabric_calls(folder: Path) -> dict[str, Any]:
    """Reductions, broadcasts, decisions and refusals of Fabric's strategy, as of the trainer's."""
    strategy = TorchPsFabricStrategy(wire="bf16")
    with pytest.raises(ConfigError, match=r"has not joined the job.*fabric.launch"):
        strategy.process_dataloader(loader(4))
    assert (strategy.world_size, strategy.is_global_zero, strategy.broadcast(3)) == (1, True, 3)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    rank = fabric.global_rank
    assert (strategy.world_size, strategy.local_rank, strategy.node_rank) == (2, rank, 0)
    os.environ.update(LOCAL_RANK="3", NODE_RANK="4")
    assert (strategy.global_rank, strategy.local_rank, strategy.node_rank) == (rank, 3, 4)
    own = torch.tensor([rank + 1])
    wanted = {"sum": 3, "min": 1, "max": 2, "mean": 1, ReduceOp.SUM: 3, ReduceOp.MAX: 2, ReduceOp.AVG: 1, None: 1}
    assert {op: strategy.all_reduce(own, reduce_op=op).item() for op in wanted} == wanted
    assert strategy.all_reduce(own.float()).item() == 1.5
    assert strategy.all_reduce("text") == "text"
    assert fabric.all_gather(own).tolist() == [[1], [2]]
    assert [fabric.broadcast(Path(f"folder/{rank}"), src) for src in (0, 1)] == [Path("folder/0"), Path("folder/1")]
    assert fabric.broadcast(own, 1).tolist() == [2]
    assert fabric.broadcast(None if rank else {"a": [1]}) == {"a": [1]}
    # From the lowest rank where the source is not there.
    assert fabric.broadcast(f"from {rank}", src=7) == "from 0"
    decisions = [strategy.reduce_boolean_decision(rank == 0, all=every) for every in (True, False)]
    assert decisions == [False, True]
    for refused in (
        lambda: strategy.all_reduce(own, reduce_op="product"),
        lambda: strategy.all_reduce(own, group=object()),
        lambda: strategy.all_gather(own, sync_grads=True),
        lambda: fabric.broadcast({1, 2}),
        lambda: strategy.setup_optimizer(torch.optim.SGD(network().parameters())),
    ):
        with pytest.raises(ConfigError):
            refused()
    with pytest.raises(ConfigError, match=r"split among the workers already.*12 of 24"):
        fabric.setup_dataloaders(strategy.cluster.shard(loader(4, 24)))
    with pytest.raises(InvalidRequest, match="at most 65536 bytes"):
        strategy.all_reduce(torch.zeros(1 << 16))
    with pytest.raises(InvalidRequest, match="tensors that differ"):
        strategy.all_reduce(torch.zeros(rank + 1))
    return {"rank": rank}


def trainer_calls(folder: Path) -> dict[str, Any]:
    """Several trainers: data that is not split, evaluation, prediction, mixed precision, a cluster that is given."""
    cluster = join_once(None)
    whole = trainer(folder, TorchPsStrategy(cluster), 1, use_distributed_sampler=False, enable_checkpointing=False)
    whole.fit(Classifier(), loader(8), loader(8))
    mixed = trainer(folder, TorchPsStrategy(cluster), 1, precision="bf16-mixed", enable_checkpointing=False)
    module = Classifier().float()
    mixed.fit(module, loader(8))
    with pytest.raises(ConfigError, match=r"split among the workers already.*use_distributed_sampler=False"):
        mixed.strategy.process_dataloader(cluster.shard(loader(8)))
    for path, ids in ((folder / "rows", range(700)), (folder / "more", range(700, 900))):
        if cluster.rank == 0:
            (folder / "few.csv").write_text("id\n1\n")
            parquet(path / "rows.parquet", ids, group=50)
    cluster.barrier()
    counted = Counted()
    read = partial(files.read, columns=["x", "id"], batch_size=30)
    rows = trainer(folder, TorchPsStrategy(cluster), 2, enable_checkpointing=False)
    rows.fit(counted, read(folder / "rows"), read(folder / "more"))
    with pytest.raises(ConfigError, match=r"leased rows.*files\.read\(…\)"):
        rows.strategy.process_dataloader(cluster.files(folder / "rows", batch_size=3))
    with pytest.raises(ConfigError, match=r"too few rows for all workers.*a DataLoader"):
        rows.strategy.process_dataloader(files.read(folder / "few.csv", batch_size=3))
    split = rows.strategy.process_dataloader(cluster.files(folder / "rows", ["id"], batch_size=3, lease=False))
    validated = mixed.validate(module, loader(8, 24, 2), verbose=False)
    predicted = mixed.predict(module, loader(8, 24, 2))
    failing = trainer(folder, "torch_ps", 1, enable_checkpointing=False)
    with pytest.raises(ValueError, match="planned"):
        failing.fit(Failing(), loader(8))
    return {
        "batches": [whole.num_training_batches, mixed.num_training_batches],
        "validated": validated[0]["val_loss"],
        "predicted": len(predicted or ()),
        "trained": counted.trained,
        "evaluated": counted.evaluated,
        "split": [id for batch in split for id in batch["id"].tolist()],
        "finite": all(bool(p.isfinite().all()) for p in module.parameters()),
    }
