"""Trains a small network with Lion, which the shards run.

PYTHONPATH=examples/lion ps-run --shards 2 --workers 2 --mode sync --optimizers lion examples/lion/train.py
"""

import torch
from lion import Lion

import ps_worker

STEPS = 200

with ps_worker.connect() as cluster:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    wanted = torch.randn(8)
    optimizer = cluster.optimizer(Lion, model, lr=3e-3, weight_decay=0.01)
    generator = torch.Generator().manual_seed(cluster.rank)
    for step in range(STEPS):
        features = torch.randn(64, 8, generator=generator)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(features).squeeze(1), features @ wanted)
        loss.backward()
        optimizer.step()
        if (step + 1) % 50 == 0:
            print(f"worker {cluster.rank}: step {step + 1}, loss {loss.item():.4f}", flush=True)
