"""Owns what a worker tells about itself: statistics for its heartbeats, and hints in the log while it waits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from ps_protocol.view import Member, MemberStats
from ps_worker.stats import StatsWindow

HINT_SECONDS = 5.0

log = logging.getLogger("ps_worker")


class Progress:
    """Written from the user's thread, read by ``stats`` from the heartbeat thread."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._lock = threading.Lock()
        self._window = StatsWindow()
        self._metrics: dict[str, float | torch.Tensor] = {}
        self._transport = ""
        self._hinted_at = float("-inf")

    def record_step(self, nbytes: int, staleness: int) -> None:
        """Count one push and pull; ``nbytes`` went over the wire, both ways."""
        with self._lock:
            self._window.record_step(time.monotonic(), nbytes, staleness)

    def record_samples(self, samples: int) -> None:
        """Count samples handed to the training loop."""
        with self._lock:
            self._window.record_samples(time.monotonic(), samples)

    def record_transport(self, by_shard: Mapping[int, str], wished: str) -> None:
        """How steps travel to each shard; logged when it changes, as a warning when it is not what was asked for."""
        found = sorted(set(by_shard.values()))
        text = ", ".join(found)
        if text == self._transport:
            return
        self._transport = text
        level = logging.INFO if wished == "auto" or found == [wished] else logging.WARNING
        log.log(level, "%s: steps travel over %s (asked for: %s)", self._member, text, wished)

    def report(self, metrics: Mapping[str, float | torch.Tensor]) -> None:
        """Keep the newest value of each metric; a tensor is read only when a heartbeat sends it."""
        with self._lock:
            self._metrics.update(metrics)

    def stats(self) -> MemberStats:
        """What the next heartbeat tells."""
        with self._lock:
            stats, metrics = self._window.snapshot(time.monotonic()), dict(self._metrics)
        # Outside the lock: reading a GPU's tensor waits for the GPU.
        return replace(
            stats, transport=self._transport, metrics={name: float(value) for name, value in metrics.items()}
        )

    def hint(self, text: str) -> None:
        """Log what is being waited for, at most every 5 seconds."""
        now = time.monotonic()
        if now - self._hinted_at >= HINT_SECONDS:
            self._hinted_at = now
            log.warning("%s: %s", self._member, text)
