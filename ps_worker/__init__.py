"""Train a PyTorch model whose parameters are on parameter servers.

``connect`` joins a job and returns a ``Cluster``, which makes the ``Optimizer`` of a model and the modules of sparse
tables. The names in ``__all__`` are the public ones; every error derives from ``PsError``.
"""

import os

# gRPC reads this once, when it is loaded. Its fork handlers abort a forked child whose parent has open streams, and a
# DataLoader(num_workers=…) forks in the middle of training; the child itself never calls gRPC (grpc/grpc#32992).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Without a setting gRPC writes a line to stderr for every handshake that fails; the typed error says more.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import gc
import importlib
import importlib.util
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if importlib.util.find_spec("torch") is None:
    raise ImportError("ps_worker needs torch, which is not installed: pip install 'torch-ps[worker]'", name="torch")

from ps_protocol.cluster.answers import Outcome
from ps_protocol.errors import (
    ConfigError,
    DamagedData,
    Fenced,
    InternalError,
    InvalidRequest,
    ModelMismatch,
    ModelMoved,
    ModelReleased,
    NonFiniteGradient,
    NotReady,
    PermissionDenied,
    PlaceTaken,
    ProtocolVersionMismatch,
    PsError,
    Refused,
    Retryable,
    StateLost,
    StorageFull,
    TableFull,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    UnknownShard,
    UnknownVersion,
    UnsupportedOptimizer,
    VersionGone,
)
from ps_worker import files, optimizers, rows, security, tables
from ps_worker.cluster import Cluster
from ps_worker.connection import connect
from ps_worker.optimizer import PsOptimizer as Optimizer
from ps_worker.step.summary import StepSummary
from ps_worker.strategies.base import Strategy
from ps_worker.strategies.registry import strategy
from ps_worker.weights import Version, subscribe

if TYPE_CHECKING:
    from ps_worker import admin, feed

if "PS_RANK" in os.environ:
    # A process of a job. What it has imported stays until its end; looking for garbage there takes most of the time in
    # which an interpreter ends. What the script makes from here on is collected as usual.
    gc.freeze()

try:
    __version__ = version("torch-ps")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "unknown"

__all__ = [
    "Cluster",
    "ConfigError",
    "DamagedData",
    "Fenced",
    "InternalError",
    "InvalidRequest",
    "ModelMismatch",
    "ModelMoved",
    "ModelReleased",
    "NonFiniteGradient",
    "NotReady",
    "Optimizer",
    "Outcome",
    "PermissionDenied",
    "PlaceTaken",
    "ProtocolVersionMismatch",
    "PsError",
    "Refused",
    "Retryable",
    "StateLost",
    "StepSummary",
    "StorageFull",
    "Strategy",
    "TableFull",
    "Unauthenticated",
    "Unavailable",
    "UnknownModel",
    "UnknownShard",
    "UnknownVersion",
    "UnsupportedOptimizer",
    "Version",
    "VersionGone",
    "admin",
    "connect",
    "feed",
    "files",
    "optimizers",
    "rows",
    "security",
    "strategy",
    "subscribe",
    "tables",
]


def __getattr__(name: str) -> Any:
    """Import a module at its first use: ``feed`` loads the compiler, which takes a second."""
    if name in ("admin", "feed"):
        return importlib.import_module(f"ps_worker.{name}")
    raise AttributeError(f"module 'ps_worker' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
