"""Defines a worker's metrics, and reads them from the counters of its session."""

from __future__ import annotations

from collections.abc import Sequence

from ps_protocol.cluster.view import Member
from ps_protocol.metrics.common import COMMON, read_common
from ps_protocol.metrics.definition import Catalogue, Sample
from ps_protocol.metrics.server import JOB_LABEL, MetricsServer
from ps_worker.session.config import WorkerConfig
from ps_worker.session.reporting import Progress

WORKER = Catalogue("worker", "worker", COMMON)

STEPS = WORKER.counter("steps_total", "Optimizer steps that were pushed, of all models.")
STEP = WORKER.histogram("step_seconds", "Duration of optimizer.step().")
COMPUTE = WORKER.counter("compute_seconds_total", "Time between two steps: the loss, gradients, loading of data.")
WAIT = WORKER.counter(
    "wait_seconds_total",
    "Time that answers to pushes took, by reason: pull for the shards, bound and round for other workers in the modes "
    "ssp and sync, reconnect for a shard that is away. With overlap it passes beside the computation.",
    "reason",
)
SAMPLES = WORKER.counter("samples_total", "Samples taken from loaders that the cluster splits.")
DATA_WAIT = WORKER.counter(
    "data_wait_seconds_total", "Time in which the loop waited for rows of files (cluster.files), a part of the compute."
)
SKIPPED = WORKER.counter(
    "skipped_row_groups_total", "Files and row groups that were left out, as on_bad_file='skip' says."
)
WORKER_BYTES = WORKER.counter("transferred_bytes_total", "Gradients and parameters on the wire, in both directions.")
RECONNECTS = WORKER.counter("reconnects_total", "Streams to shards that were opened again during training.")
NONFINITE = WORKER.counter(
    "nonfinite_steps_total", "Steps whose gradients held NaN or infinity, refused or skipped by this worker."
)
EXCHANGE = WORKER.histogram(
    "exchange_seconds",
    "Duration of collective calls (all_reduce, broadcast, those of Lightning and Hugging Face), with the time that "
    "other workers took to make them.",
)
EXCHANGE_BYTES = WORKER.counter("exchange_bytes_total", "Payloads of collective calls, in both directions.")
WORKER_CLOCK = WORKER.gauge("clock", "Steps that this worker has pushed in the present phase.")


def read_worker(progress: Progress) -> Sequence[Sample]:
    """The numbers of this process. From any thread."""
    counters = progress.counters
    steps, samples, nbytes = progress.totals
    return [
        *read_common(),
        STEPS.of(steps),
        STEP.of(counters.step.value),
        COMPUTE.of(counters.compute_seconds),
        *(WAIT.of(seconds, reason.value) for reason, seconds in counters.waits.items()),
        SAMPLES.of(samples),
        DATA_WAIT.of(counters.data_wait_seconds),
        SKIPPED.of(counters.skipped_groups),
        WORKER_BYTES.of(nbytes),
        RECONNECTS.of(counters.reconnects),
        NONFINITE.of(counters.nonfinite),
        EXCHANGE.of(counters.exchange.value),
        EXCHANGE_BYTES.of(counters.exchange_bytes),
        WORKER_CLOCK.of(progress.position[1]),
    ]


def start_server(config: WorkerConfig, member: Member, progress: Progress, job: str = "") -> MetricsServer:
    """Serve these metrics at the address in ``config``. ``job``: its name; empty if unknown.

    Raises ConfigError, also for an address beyond loopback without TLS and tokens.
    """
    security = config.opened_security(listens=True)
    security.check_bind(config.metrics_bind, "the server of metrics")
    return MetricsServer(
        config.metrics_bind,
        config.metrics_port or 0,
        lambda: read_worker(progress),
        {WORKER.constant: str(member.index)} | ({JOB_LABEL: job} if job else {}),
        security=security,
        component=member.role.value,
    )
