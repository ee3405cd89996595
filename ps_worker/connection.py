"""``connect``: how a training script comes into its job; and ``connected``, the connection of a process that runs
trainers of other libraries.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Literal

import torch

from ps_protocol.model.late_compiler import load_compiler_late
from ps_protocol.security.settings import SecuritySettings
from ps_worker.cluster import Cluster
from ps_worker.embedded import EmbeddedCluster
from ps_worker.session import logs, uncaught
from ps_worker.session.config import WorkerConfig, connect_timeout, runs_alone
from ps_worker.session.session import Session

_classes: tuple[type[Session], type[Cluster]] = (Session, Cluster)


def connect_as(session: type[Session], cluster: type[Cluster]) -> None:
    """From now on ``connect`` joins as a ``session`` and returns a ``cluster``."""
    global _classes
    _classes = session, cluster


def connect(
    coordinator: str | None = None,
    *,
    role: str | None = None,
    rank: int | None = None,
    device: str | None = None,
    transport: str | None = None,
    connect_timeout_seconds: float | None = None,
    reconnect_timeout_seconds: float | None = None,
    security: SecuritySettings | None = None,
    local: bool = True,
    name: str | None = None,
    per_host: bool | Literal["sync"] | None = None,
) -> Cluster:
    """Join a job as a worker or evaluator, and return once all expected members are there.

    What is not given comes from the environment: ``PS_COORDINATOR``, ``PS_ROLE``, ``PS_RANK``, ``PS_DEVICE``,
    ``PS_TRANSPORT``, ``PS_PER_HOST``, ``PS_CONNECT_TIMEOUT``, ``PS_RECONNECT_TIMEOUT``, then from ``TF_CONFIG``.
    ``ps-run`` sets what its workers need. Under torchrun the rank may come from ``RANK``, and ``PS_COORDINATOR=:7000``
    is that port of ``MASTER_ADDR``.

    A worker without any address starts a cluster of its own and prints so on stderr: a coordinator and one shard, as
    processes of this machine that end with it.

    Errors of torch-ps that the script does not catch are printed without torch-ps's own frames; ``PS_TRACEBACK=full``
    prints all frames. With ``PS_LOG_FORMAT`` (text, json) or ``PS_LOG_LEVEL`` torch-ps writes its log to stderr;
    without them its records go to the logging of the script.

    Args:
        coordinator: Address of the coordinator, host:port.
        role: "worker" or "evaluator".
        rank: Number of this worker, from 0. None: the lowest free one.
        device: Torch device for the model, such as "cuda:1".
        transport: Transport of steps to try first: "shm" (shared memory with shards on this host), "bulk" (TCP sockets
            beside gRPC) or "grpc"; "auto" tries them in this order. The next one is used where one is not available.
        connect_timeout_seconds: How long to wait for coordinator, shards and other workers. Default: 60.
        reconnect_timeout_seconds: How long steps wait for a coordinator or shard that went away. Default: 60.
        security: TLS and tokens. None: from ``PS_TLS_CA``, ``PS_TLS_CERT``, ``PS_TLS_KEY``, ``PS_TOKEN_FILE`` and
            ``PS_TOKEN``.
        local: Start an own cluster where no address is known. False: raise ConfigError.
        name: Prefix of names: models are called "NAME", "NAME-1", … in place of "model", "model-1", …, and leased data
            "NAME-data". A process that connects to one job again, as a training function that is called twice does,
            gives another name each time, the same on all workers; else it goes on with the models and the data of
            before.
        per_host: Push together with the other workers of this host: one of them sends the mean of their gradients, and
            receives the parameters for all. "sync": while the mode is ``sync`` without backup workers, where the result
            is the same. False where neither this nor ``PS_PER_HOST`` says so.

    Returns:
        The connection, best used in a ``with`` block.

    Raises:
        ConfigError: A setting is missing or wrong.
        Unauthenticated: The job does not accept this process.
        PermissionDenied: The job does not accept this process in its role.
        PlaceTaken: Another process has this rank, or the job has all its workers. With ``PS_TAKE_OVER=1`` in the
            environment the other process is fenced instead.
        InvalidRequest: The job has no such rank.
        Unavailable: Coordinator, shards or other workers are not there in time.
    """
    logs.install(os.environ)
    uncaught.install()
    load_compiler_late(torch.optim.Optimizer)
    embedded = None
    if local and coordinator is None and runs_alone(os.environ, role, rank, security):
        print("torch-ps: no coordinator is named; this script runs with a cluster of its own", file=sys.stderr)  # noqa: T201
        embedded = EmbeddedCluster.start(connect_timeout(os.environ, connect_timeout_seconds))
        coordinator = embedded.address
    config = WorkerConfig.from_environment(
        os.environ,
        coordinator=coordinator,
        role=role,
        rank=rank,
        device=device,
        transport=transport,
        connect_timeout_seconds=connect_timeout_seconds,
        reconnect_timeout_seconds=reconnect_timeout_seconds,
        security=security,
        per_host=per_host,
    )
    try:
        session_class, cluster_class = _classes
        return cluster_class(session_class.join(config), embedded, name)
    except BaseException:
        if embedded is not None:
            embedded.close()
        raise


_joined: dict[int, Cluster] = {}
"""The connection of this process, by its number, which trainers of other libraries share."""

_failure: BaseException | None = None
"""What ended the last run of such a trainer, if it did not end well."""


def connected() -> Cluster:
    """Join the job from the environment, once, and leave it when the process ends. What ended an earlier trainer's run
    is no reason to leave any more: the script goes on. Raises what ``connect`` raises.
    """
    note_failure(None)
    cluster = _joined.get(os.getpid())
    if cluster is None or cluster._left:
        cluster = _joined[os.getpid()] = connect()
        cluster.__enter__()
        atexit.register(leave)
    return cluster


def note_failure(error: BaseException | None) -> None:
    """Keep what ended the run of a trainer: the reason with which this process leaves its job."""
    global _failure
    _failure = error


def leave() -> None:
    """Leave the job that ``connected`` has joined in this process. Safe to repeat."""
    cluster = _joined.pop(os.getpid(), None)
    if cluster is not None:
        # What Python reported as uncaught ended the script.
        error = _failure or getattr(sys, "last_value", None)
        cluster.__exit__(type(error) if error else None, error, None)
