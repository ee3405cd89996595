"""The SDK of torch-ps: train a PyTorch model whose parameters live on parameter servers. The public names are these."""

from ps_protocol.errors import (
    ConfigError,
    Fenced,
    ModelMismatch,
    NonFiniteGradient,
    PsError,
    StateLost,
    Unavailable,
    UnsupportedOptimizer,
)
from ps_worker.cluster import Cluster, connect
from ps_worker.optimizer import PsOptimizer as Optimizer

__all__ = [
    "Cluster",
    "ConfigError",
    "Fenced",
    "ModelMismatch",
    "NonFiniteGradient",
    "Optimizer",
    "PsError",
    "StateLost",
    "Unavailable",
    "UnsupportedOptimizer",
    "connect",
]
