"""What ``psctl`` does to a running job, from Python: status, mode, checkpoints, moves, scaling, tables, rates.

    with ps_worker.admin.connect("host:7000") as job:
        if job_state(job.status()).name == "training":
            job.checkpoint()

The commands of ``psctl`` that need no job – ``certs``, ``checkpoints``, ``export``, ``verify``, ``trace`` – read and
write files, and stay commands.
"""

from __future__ import annotations

import os

from ps_protocol import times
from ps_protocol.client.admin import (
    AdminClient,
    JobSize,
    MoveSummary,
    RestoredCheckpoint,
    WrittenCheckpoint,
)
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.client.model_status import ModelRates, TableTotals
from ps_protocol.cluster.history import CheckpointFacts, Curve, Curves, JobHistory, PlacedVariable
from ps_protocol.cluster.job_state import JobState, ailments, diverging, job_state
from ps_protocol.cluster.scaling import ScaleProgress
from ps_protocol.cluster.view import (
    ClusterStatus,
    ClusterView,
    Divergence,
    JobEvent,
    Member,
    MemberStats,
    MemberStatus,
    MoveProgress,
    Role,
)
from ps_protocol.cluster.weights import WeightsPiece, WeightsPin, WeightsReader, WeightsState, WeightsVersion
from ps_protocol.model.spec import Consistency, Mode, StalePolicy
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.settings import SecuritySettings
from ps_worker.session.config import WorkerConfig

__all__ = [
    "AdminClient",
    "CheckpointFacts",
    "ClusterStatus",
    "ClusterView",
    "Consistency",
    "Curve",
    "Curves",
    "Divergence",
    "JobEvent",
    "JobHistory",
    "JobSize",
    "JobState",
    "Member",
    "MemberStats",
    "MemberStatus",
    "Mode",
    "ModelRates",
    "MoveProgress",
    "MoveSummary",
    "PlacedVariable",
    "RestoredCheckpoint",
    "Role",
    "ScaleProgress",
    "StalePolicy",
    "TableTotals",
    "WeightsPiece",
    "WeightsPin",
    "WeightsReader",
    "WeightsState",
    "WeightsVersion",
    "WrittenCheckpoint",
    "ailments",
    "connect",
    "diverging",
    "job_state",
]


def connect(
    coordinator: str | None = None,
    *,
    security: SecuritySettings | None = None,
    connect_timeout_seconds: float = times.CONNECT_SECONDS,
) -> AdminClient:
    """Connect to the coordinator of a running job, without joining it.

    Args:
        coordinator: Address of the coordinator, host:port. None: ``PS_COORDINATOR``, else ``TF_CONFIG``.
        security: TLS and tokens. None: from the environment. Of a file with tokens, the first one of an admin is used.
        connect_timeout_seconds: How long to wait for a coordinator that does not answer. With 0 it need not be there
            yet, and the first call waits: ``connect(connect_timeout_seconds=0).wait("training")``.

    Returns:
        A client, best used in a ``with`` block.

    Raises:
        ConfigError: No address is known, or a file of ``security`` is missing or wrong.
        Unavailable: The coordinator does not answer.
        Unauthenticated: It wants TLS or a token.
    """
    # A reader's role, whatever this process is otherwise: it may run beside a server, with the TF_CONFIG of that.
    config = WorkerConfig.from_environment(os.environ, coordinator=coordinator, role="evaluator", security=security)
    job = AdminClient(CoordinatorClient(config.coordinator, Security(config.security, AccessRole.ADMIN)))
    if connect_timeout_seconds:
        try:
            job.connect(connect_timeout_seconds)
        except BaseException:
            job.close()
            raise
    return job
