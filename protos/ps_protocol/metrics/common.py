"""Metrics of every process: which build it is, and how long it has run."""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from ps_protocol import PROTOCOL_VERSION
from ps_protocol.metrics.definition import Catalogue, Sample
from ps_protocol.security.security import Security

COMMON = Catalogue("process")

BUILD_INFO = COMMON.gauge(
    "build_info", "Version of torch-ps, of its protocol and of Python; always 1.", "version", "protocol", "python"
)
START_TIME = COMMON.gauge("start_time_seconds", "Unix time at which the process began to count.")
PROCESS_CPU = COMMON.counter("process_cpu_seconds_total", "CPU time of the process, of all threads.")
PROCESS_MEMORY = COMMON.gauge("process_peak_memory_bytes", "The most resident memory that the process has had.")

AUTH_FAILURES = COMMON.counter(
    "auth_failures_total",
    "Calls refused, by reason: unauthenticated for a missing, wrong or expired proof, permission for a lesser role.",
    "reason",
)
CERTIFICATE_EXPIRY = COMMON.gauge(
    "certificate_expiry_timestamp_seconds", "Unix time at which the certificate of the process expires."
)

_started = time.time()


def _begin() -> None:
    global _started
    _started = time.time()


# A forked process begins then.
os.register_at_fork(after_in_child=_begin)


def read_common() -> Iterator[Sample]:
    """The numbers of this process."""
    yield BUILD_INFO.of(1, _version(), str(PROTOCOL_VERSION), platform.python_version())
    yield START_TIME.of(_started)
    yield PROCESS_CPU.of(time.process_time())
    yield PROCESS_MEMORY.of(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def read_security(security: Security) -> Iterator[Sample]:
    """Refused calls, none where nobody is authenticated, and the end of the certificate where there is one."""
    for reason, count in security.refused.counts.items():
        yield AUTH_FAILURES.of(count, reason)
    if (expiry := security.certificate_expiry) is not None:
        yield CERTIFICATE_EXPIRY.of(expiry)


def _version() -> str:
    try:
        return version("torch-ps")
    except PackageNotFoundError:  # the source tree, not installed
        return "unknown"
