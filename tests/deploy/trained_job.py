"""A training script that gives every metric something to count: two variables, a table, leased data."""

import os
import time
from pathlib import Path

import torch

import ps_worker
from ps_worker import rows
from ps_worker.tables import Table


class Model(torch.nn.Module):
    def __init__(self, bags: torch.nn.Module) -> None:
        super().__init__()
        self.bags = bags
        self.dense = torch.nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dense(self.bags({"users": ids.reshape(-1, 1)})["users"])


end = Path(os.environ["TEST_END_FILE"])
torch.manual_seed(0)
with ps_worker.connect() as cluster:
    table = Table(4, name="users", optimizer=rows.Adagrad(lr=0.1))
    model = Model(cluster.embedding_bags({"users": table}, mode="sum"))
    optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.01)
    data = torch.randint(0, 50, (4_000_000,))
    for ids in cluster.shard(torch.utils.data.DataLoader(data, batch_size=8)):
        loss = model(ids).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        cluster.report(loss=loss)
        if end.exists():
            break
        time.sleep(0.05)  # others need the processor: nobody asks how fast it trains
