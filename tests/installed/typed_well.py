"""A program that type checkers accept; checked by installed.sh against the installed packages, never run."""

import torch

import ps_worker
from ps_protocol.v1 import shard_pb2
from ps_server.cli.launcher.main import main


def train(model: torch.nn.Module) -> int:
    with ps_worker.connect() as cluster:
        optimizer: ps_worker.Optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        optimizer.step()
        return cluster.rank


chunk = shard_pb2.Chunk(position=1, payload=b"")
position: int = chunk.position
start = main
