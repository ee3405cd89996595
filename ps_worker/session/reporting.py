"""What a worker counts of its steps, for heartbeats and metrics, and the messages in its log while it waits."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from ps_protocol import times
from ps_protocol.cluster.transport import IN_CLEAR
from ps_protocol.cluster.view import ClusterView, Member, MemberStats, Role
from ps_protocol.errors import ConfigError
from ps_protocol.logs import EventLogger
from ps_protocol.metrics.histogram import Histogram

log = EventLogger("ps_worker")


def plain_metrics(metrics: Mapping[str, object]) -> dict[str, float | torch.Tensor]:
    """Numbers, and detached tensors of one element, by name. Raises ConfigError for anything else."""
    plain: dict[str, float | torch.Tensor] = {}
    for name, value in metrics.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            plain[name] = value.detach()
        elif isinstance(value, int | float):
            plain[name] = float(value)
        else:
            raise ConfigError(
                f"report() cannot show '{name}'",
                expected="a number or a tensor of one element",
                actual=repr(value)[:80],
            )
    return plain


class WaitReason(enum.Enum):
    """What the training thread, or with ``overlap`` the exchange beside it, waits for."""

    #: The shards: their updates, and the transfer.
    PULL = "pull"
    #: Other workers, for the bound of mode ssp.
    BOUND = "bound"
    #: Other workers, for the round of mode sync.
    ROUND = "round"
    #: A shard that is away.
    RECONNECT = "reconnect"

    #: Hash by identity: Enum's own ``__hash__`` runs in Python, and every step looks members up.
    __hash__ = object.__hash__


@dataclass(slots=True)
class WorkerCounters:
    """Written by the threads that make steps, one at a time; read by any: each number is one word."""

    #: Duration of ``optimizer.step()``, in seconds.
    step: Histogram = field(default_factory=Histogram)
    #: In seconds; has every reason.
    waits: dict[WaitReason, float] = field(default_factory=lambda: dict.fromkeys(WaitReason, 0.0))
    #: Between two steps of this process, whatever the models.
    compute_seconds: float = 0.0
    #: Streams opened again after a step had been made.
    reconnects: int = 0
    #: Steps whose gradients held NaN or infinity, refused or skipped by this worker; and those that it refused.
    nonfinite: int = 0
    refused: int = 0
    #: Duration of collective calls that got their results, in seconds.
    exchange: Histogram = field(default_factory=Histogram)
    #: Time in which the loop waited for rows of files, and files and row groups that were left out.
    data_wait_seconds: float = 0.0
    skipped_groups: int = 0
    #: Payloads of these calls: this worker's, and those of all workers that came back.
    exchange_bytes: int = 0
    _ended: float = 0.0

    def stepped(self, began: float, now: float) -> None:
        """The step that began at ``began``, seconds of a steady clock, has ended."""
        if self._ended:
            self.compute_seconds += began - self._ended
        self.step.observe(now - began)
        self._ended = now

    def exchanged(self, seconds: float, nbytes: int) -> None:
        """A collective call got its results; ``nbytes`` of payloads went in both directions."""
        self.exchange.observe(seconds)
        self.exchange_bytes += nbytes

    def answered(self, seconds: float, waited: float, reconnecting: float, others: WaitReason) -> None:
        """The answers to a push came after ``seconds``.

        Of these the shards ``waited`` for other workers, for the reason ``others``, and ``reconnecting`` seconds are
        counted already.
        """
        here = max(0.0, seconds - reconnecting)
        waited = min(waited, here)
        self.waits[others] += waited
        self.waits[WaitReason.PULL] += here - waited


class Progress:
    """Written from the user's thread, read by ``stats`` from the heartbeat thread."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._lock = threading.Lock()
        self._window = StatsWindow()
        self._metrics: dict[str, float | torch.Tensor] = {}
        self._transport = ""
        self._hinted_at = float("-inf")
        #: Durations and waits of steps.
        self.counters = WorkerCounters()
        #: host:port of this process's metrics; empty: it serves none.
        self.metrics_address = ""
        #: The phase and the clock of the last push.
        self.position = (0, 0)

    def record_step(self, nbytes: int, staleness: int) -> None:
        """Count one push and pull; ``nbytes`` were transferred in both directions."""
        with self._lock:
            self._window.record_step(time.monotonic(), nbytes, staleness)

    def record_samples(self, samples: int) -> None:
        """Count samples handed to the training loop."""
        with self._lock:
            self._window.record_samples(time.monotonic(), samples)

    def record_transport(self, by_shard: Mapping[int, str], requested: str) -> None:
        """The transport to each shard. Logged when it changes; a warning when it is not the one requested."""
        found = sorted(set(by_shard.values()))
        text = ", ".join(found)
        if text == self._transport:
            return
        self._transport = text
        level = (
            logging.INFO
            if requested == "auto" or [name.removesuffix(IN_CLEAR) for name in found] == [requested]
            else logging.WARNING
        )
        log.log(level, "transport", "%s: steps use transport %s (requested: %s)", self._member, text, requested)

    @property
    def transport(self) -> str:
        """What ``record_transport`` recorded last."""
        return self._transport

    def report(self, metrics: Mapping[str, float | torch.Tensor]) -> None:
        """Keep the newest value of each metric; a tensor is read only when a heartbeat sends it."""
        with self._lock:
            self._metrics.update(metrics)

    def stats(self) -> MemberStats:
        """The statistics of the next heartbeat."""
        with self._lock:
            stats, metrics = self._window.snapshot(time.monotonic()), dict(self._metrics)
        # Outside the lock: reading a GPU's tensor waits for the GPU.
        phase, clock = self.position
        return replace(
            stats,
            transport=self._transport,
            metrics={name: float(value) for name, value in metrics.items()},
            phase=phase,
            clock=clock,
            wait_seconds={reason.value: seconds for reason, seconds in self.counters.waits.items()},
            metrics_address=self.metrics_address,
            nonfinite=self.counters.refused,
        )

    @property
    def totals(self) -> tuple[int, int, int]:
        """Steps, samples and bytes so far."""
        with self._lock:
            return self._window.totals

    def hint(self, text: str) -> None:
        """Log what the worker waits for, at most every 5 seconds."""
        now = time.monotonic()
        if now - self._hinted_at >= times.HINT_SECONDS:
            self._hinted_at = now
            log.warning("waiting", "%s: %s", self._member, text)


def missing(view: ClusterView) -> str:
    """The missing members of a cluster that has not started, as text: "shard 1 and 1 more worker"."""
    shards = sorted(set(range(view.expected_shards)) - set(view.live(Role.SHARD)))
    workers = max(0, (view.expected_workers or view.least_workers) - len(view.live(Role.WORKER)))
    parts = [f"shard{'s' if len(shards) > 1 else ''} " + ", ".join(map(str, shards))] if shards else []
    parts += [f"{workers} more worker{'s' if workers > 1 else ''}"] if workers else []
    return " and ".join(parts) or "the coordinator to start the job"


@dataclass(frozen=True, slots=True)
class _Totals:
    at_seconds: float
    steps: int = 0
    samples: int = 0
    bytes: int = 0


class StatsWindow:
    """Counts steps, samples and bytes; rates are over the last ``window_seconds``.

    Not locked: its session calls it under one lock. ``now`` is a monotonic time in seconds that never goes back.
    """

    def __init__(self, window_seconds: float = 10.0) -> None:
        self._window_seconds = window_seconds
        self._steps = self._samples = self._bytes = 0
        #: Totals at past moments, oldest first; only the first may be older than the window.
        self._marks: deque[_Totals] = deque()
        self._staleness = 0

    def record_step(self, now: float, nbytes: int, staleness: int) -> None:
        """One push and pull of ``nbytes`` together, whose push had this staleness."""
        self._staleness = staleness
        if not self._marks or now - self._marks[-1].at_seconds >= 0.25:
            self._add(now, 1, 0, nbytes)
            return
        self._steps += 1
        self._bytes += nbytes

    def record_samples(self, now: float, samples: int) -> None:
        """Samples handed to the training loop."""
        self._add(now, 0, samples, 0)

    @property
    def totals(self) -> tuple[int, int, int]:
        """Steps, samples and bytes so far."""
        return self._steps, self._samples, self._bytes

    def snapshot(self, now: float) -> MemberStats:
        """Totals, and rates per second; rates are 0 until there is a time to divide by."""
        self._forget(now)
        first = self._marks[0] if self._marks else self._totals_at(0.0)
        # A mark from before a pause is older than the window; everything after it is within the window.
        elapsed = min(now - first.at_seconds, self._window_seconds)
        per_second = 1.0 / elapsed if elapsed > 0 else 0.0
        return MemberStats(
            steps=self._steps,
            samples=self._samples,
            steps_per_second=(self._steps - first.steps) * per_second,
            bytes_per_second=(self._bytes - first.bytes) * per_second,
            samples_per_second=(self._samples - first.samples) * per_second,
            staleness=self._staleness,
        )

    def _add(self, now: float, steps: int, samples: int, nbytes: int) -> None:
        marks = self._marks
        if marks and now - marks[-1].at_seconds >= 0.25:
            marks.append(self._totals_at(now))
            self._forget(now)
        self._steps += steps
        self._samples += samples
        self._bytes += nbytes
        if not marks:
            # The first event only starts the window: there is no time before it.
            marks.append(self._totals_at(now))

    def _totals_at(self, now: float) -> _Totals:
        return _Totals(now, self._steps, self._samples, self._bytes)

    def _forget(self, now: float) -> None:
        while len(self._marks) > 1 and now - self._marks[1].at_seconds >= self._window_seconds:
            self._marks.popleft()
