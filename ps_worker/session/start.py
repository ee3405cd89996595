"""Waits until the cluster is complete, saying what is missing."""

from __future__ import annotations

import time
from collections.abc import Callable

from ps_protocol.client.membership import Membership
from ps_protocol.errors import NotReady, Unavailable
from ps_worker.session.config import WorkerConfig
from ps_worker.session.reporting import missing


def wait_until_started(
    membership: Membership, config: WorkerConfig, hint: Callable[[str], None], deadline: float
) -> None:
    """Return once the job has started. ``deadline`` is of time.monotonic(). Raises Unavailable after it, Fenced."""
    while True:
        try:
            membership.wait_for(lambda view: view.started, min(1.0, max(0.0, deadline - time.monotonic())))
            return
        except NotReady:
            view = membership.view
        lacking = missing(view)
        if time.monotonic() >= deadline:
            raise Unavailable(
                f"the cluster is not complete after {config.connect_timeout_seconds:g} s: {lacking} missing",
                expected=f"{view.expected_shards} shards and {view.expected_workers or view.least_workers} workers",
                remedy="start what is missing, or wait longer with PS_CONNECT_TIMEOUT",
            )
        hint(f"waiting for {lacking}")
