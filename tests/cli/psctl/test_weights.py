"""psctl weights list: what it prints of a name with many readers."""

from __future__ import annotations

from ps_protocol.cluster.weights import WeightsReader
from ps_server.cli.psctl.weights import _shown
from tests.glance.jobs import publication


def test_readers_that_are_told_have_a_line_and_the_others_are_counted() -> None:
    readers = [WeightsReader(str(at), "host", at, 5, 2_000_000, 1_000_000, 0.0, 6_000_000) for at in range(3)]
    sums = {"delta_bytes": 20_000_000, "full_bytes": 10_000_000, "saved_bytes": 60_000_000}
    lines = _shown(publication("policy", *readers, reader_count=10_000, relayed_readers=50, **sums)).splitlines()
    assert lines[0] == (
        "policy: version 7 of model 'model', 10000 readers and 50 by relays, up to 2 behind, "
        "20.0 MB as deltas, 10.0 MB whole, 60.0 MB saved"
    )
    assert lines[2] == "  reader host process 0: version 5, 2 behind, 2.0 MB as deltas, 1.0 MB whole, 6.0 MB saved"
    assert lines[-1] == "  and 9997 more readers"


def test_a_name_without_readers_says_so() -> None:
    assert _shown(publication()).splitlines()[0] == "policy: version 7 of model 'model', no readers"
