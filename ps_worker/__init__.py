"""The SDK of torch-ps: train a PyTorch model whose parameters live on parameter servers. The public names are these."""

import os

# gRPC reads this once, when it is loaded. Its fork handlers abort a forked child whose parent has open streams, and a
# DataLoader(num_workers=…) forks in the middle of training; the child itself never calls gRPC (grpc/grpc#32992).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from importlib.metadata import PackageNotFoundError, version

from ps_protocol.errors import (
    ConfigError,
    Fenced,
    ModelMismatch,
    NonFiniteGradient,
    PlaceTaken,
    PsError,
    StateLost,
    TableFull,
    Unavailable,
    UnsupportedOptimizer,
)
from ps_worker import rows, tables
from ps_worker.cluster import Cluster, connect
from ps_worker.optimizer import PsOptimizer as Optimizer

try:
    __version__ = version("torch-ps")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "unknown"

__all__ = [
    "Cluster",
    "ConfigError",
    "Fenced",
    "ModelMismatch",
    "NonFiniteGradient",
    "Optimizer",
    "PlaceTaken",
    "PsError",
    "StateLost",
    "TableFull",
    "Unavailable",
    "UnsupportedOptimizer",
    "connect",
    "rows",
    "tables",
]
