"""``connect``: how a training script comes into its job."""

from __future__ import annotations

import os
import sys

import torch

from ps_protocol.model.late_compiler import load_compiler_late
from ps_protocol.security.settings import SecuritySettings
from ps_worker.cluster import Cluster
from ps_worker.embedded import EmbeddedCluster
from ps_worker.session import logs, uncaught
from ps_worker.session.config import WorkerConfig, connect_timeout, runs_alone
from ps_worker.session.session import Session


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
) -> Cluster:
    """Join the cluster as a worker (or evaluator) and wait until it is complete.

    What is not given comes from ``PS_COORDINATOR``, ``PS_ROLE``, ``PS_RANK``, ``PS_DEVICE``, ``PS_TRANSPORT``,
    ``PS_CONNECT_TIMEOUT`` and ``PS_RECONNECT_TIMEOUT``, then from ``TF_CONFIG``. ``ps-run`` sets what its workers need.
    Under torchrun the rank may come from ``RANK``, and ``PS_COORDINATOR=:7000`` is that port of ``MASTER_ADDR``.

    A worker without any address starts a cluster of its own: a coordinator and one shard, as processes of this machine
    that end with it. It says so on stderr. ``local=False`` makes a missing address an error instead.

    ``transport`` is the transport of steps: "shm" (shared memory with shards on this host), "bulk" (TCP sockets beside
    gRPC) or "grpc" alone. Where one is not available, the next is used; "auto", the default, begins with the first.

    ``name``: models are then called "NAME", "NAME-1", … in place of "model", "model-1", …, and leased data "NAME-data".
    A process that connects to one job again, as a training function that is called twice does, would otherwise go on
    with the models and the data of before; all workers give the same name.

    ``security`` names the files of TLS and tokens (``ps_worker.security``); without it they come from
    ``PS_TLS_CA``, ``PS_TLS_CERT``, ``PS_TLS_KEY``, ``PS_TOKEN_FILE`` and ``PS_TOKEN`` (docs/security.md).

    Raises ConfigError for settings that are missing or wrong; Unauthenticated and PermissionDenied when the job does
    not accept this process, or not in this role; PlaceTaken when another process has this rank (with
    ``PS_TAKE_OVER=1`` in the environment that one is fenced) or the job has all its workers; InvalidRequest for a rank
    that the job does not have; Unavailable when coordinator, shards or other workers do not come within
    ``connect_timeout_seconds`` (default 60). Errors of torch-ps that the script does not catch are shown without
    torch-ps's own frames; ``PS_TRACEBACK=full`` shows all frames. ``PS_LOG_FORMAT`` (text, json) and ``PS_LOG_LEVEL``
    have torch-ps write its log to stderr; without them its records go to the script's own logging.
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
    )
    try:
        return Cluster(Session.join(config), embedded, name)
    except BaseException:
        if embedded is not None:
            embedded.close()
        raise
