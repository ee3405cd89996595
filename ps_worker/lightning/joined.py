"""The connection to the job that all trainers of a process share; it ends with the process."""

from __future__ import annotations

import atexit
import os
import sys

from lightning.fabric.utilities.rank_zero import rank_zero_only

from ps_protocol.errors import ConfigError
from ps_worker.cluster import Cluster
from ps_worker.connection import connect

_RANK_VARIABLE = "PS_RANK"

_cluster: Cluster | None = None

_failure: BaseException | None = None
"""What ended the last run of a trainer, if it did not end well."""


def guess_rank() -> None:
    """Before the process has joined: only the rank in its environment shows what Lightning shows once."""
    rank = os.environ.get(_RANK_VARIABLE, "")
    if rank.isdecimal():
        _set_rank(int(rank))


def _set_rank(rank: int) -> None:
    vars(rank_zero_only)["rank"] = rank


def join(given: Cluster | None) -> Cluster:
    """The cluster ``given``, else the one of this process, which joins the job with the first call.

    Raises ConfigError for an evaluator, and what ``connect`` raises.
    """
    global _cluster
    note_failure(None)
    cluster = given or _cluster
    if cluster is None:
        cluster = _cluster = connect()
        cluster.__enter__()
        atexit.register(leave, os.getpid())
    if cluster.role != "worker":
        raise ConfigError(
            "an evaluator cannot run a trainer",
            expected="worker",
            actual=cluster.role,
            remedy="run evaluators with cluster.follow(model), and a trainer with PS_ROLE=worker",
        )
    _set_rank(cluster.rank)
    return cluster


def note_failure(error: BaseException | None) -> None:
    """What ended the run of a trainer, for the reason with which this process leaves its job."""
    global _failure
    _failure = error


def leave(pid: int) -> None:
    """Leave the job, in the process ``pid`` that joined it: what happens at its exit. Repeatable."""
    global _cluster
    if _cluster is None or os.getpid() != pid:
        return
    cluster, _cluster = _cluster, None
    error = _failure or getattr(sys, "last_value", None)
    cluster.__exit__(type(error) if error else None, error, None)
