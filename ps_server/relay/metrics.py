"""The metrics of a relay: what it has, what it received and sent, and who reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ps_protocol.metrics.common import COMMON, read_common
from ps_protocol.metrics.definition import Catalogue, Sample
from ps_server.limits import LimitCounts
from ps_server.relay.following import JobFollower
from ps_server.relay.held import RelayedWeights
from ps_server.serving.metrics import SERVER, read_limits

RELAY = Catalogue("relay", "", COMMON, SERVER)

NEWEST = RELAY.gauge("relay_newest_version", "Number of the newest version that the relay has.", "name")
VERSIONS = RELAY.gauge("relay_held_versions", "Versions that the relay has.", "name")
HELD = RELAY.gauge("relay_held_bytes", "Bytes of the versions that the relay has.", "name")
RECEIVED = RELAY.counter(
    "relay_received_bytes_total", "Bytes of versions received from the job, by form: delta or full.", "name", "form"
)
SENT = RELAY.counter(
    "relay_sent_bytes_total",
    "Bytes of versions sent to readers, by form: delta or full. Readers that map the relay's memory are sent none.",
    "form",
)
READERS = RELAY.gauge("relay_readers", "Readers that ask this relay.", "name")
BEHIND = RELAY.gauge("relay_behind_versions", "Versions that the reader furthest behind has not got.", "name")
RECONNECTS = RELAY.counter(
    "relay_reconnects_total",
    "Calls to the coordinator of the job that broke off and were made again: about one for each name when it was away.",
)
FAILURES = RELAY.counter(
    "relay_failures_total",
    "How often the job has given no version, by reason: wait where it was away for long, try_again where it refused or "
    "what it sent was damaged, begin_again where it was another job.",
    "name",
    "reason",
)


class RelayMetrics:
    """Reads the numbers of one relay. Called on its event loop."""

    def __init__(self, held: RelayedWeights, following: JobFollower, limits: LimitCounts) -> None:
        self._held = held
        self._following = following
        self._limits = limits

    def read(self) -> Iterator[Sample]:
        """All metrics of RELAY, as they are now; those of a name once it is followed."""
        yield from read_common()
        yield from read_limits(self._limits)
        held = Counter[str]()
        for name, _, size in self._held.pieces:
            held[name] += size
        for state in self._held.states():
            yield NEWEST.of(state.newest, state.name)
            yield VERSIONS.of(len(state.versions), state.name)
            yield HELD.of(held[state.name], state.name)
            yield READERS.of(state.reader_count, state.name)
            yield BEHIND.of(state.most_behind, state.name)
        for name, received in self._following.received.items():
            yield RECEIVED.of(received.delta_bytes, name, "delta")
            yield RECEIVED.of(received.full_bytes, name, "full")
        for (name, step), count in self._following.failures.items():
            yield FAILURES.of(count, name, step.name.lower())
        yield RECONNECTS.of(self._following.reconnects)
        delta_bytes, full_bytes = self._held.sent_bytes
        yield SENT.of(delta_bytes, "delta")
        yield SENT.of(full_bytes, "full")
