"""How large the segments of a log are, and what updates fit into the disk space it was given. Pure."""

from __future__ import annotations

from ps_protocol.errors import ConfigError
from ps_server.log.head import HEAD_BYTES
from ps_server.log.record import ALIGNMENT_BYTES, record_bytes

SEGMENT_BYTES = 64 << 20
"""Size of a segment, at most; larger records get larger ones."""

SEGMENTS = 8
"""A log that was given little space has about so many."""

FEWEST_SEGMENTS = 3
"""One that is written, one that waits, one whose records a snapshot is about to replace."""

_SMALLEST_SEGMENT_BYTES = 64 << 10


def segment_bytes_for(largest: int, bound_bytes: int | None) -> int:
    """Size of a segment: room for at least two records of ``largest`` bytes. ``bound_bytes``: all the log may take."""
    unit = SEGMENT_BYTES
    if bound_bytes is not None:
        part = (bound_bytes - HEAD_BYTES) // SEGMENTS // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        unit = min(unit, max(_SMALLEST_SEGMENT_BYTES, part))
    return max(unit, -(-2 * largest // unit) * unit)


def require_space(shard: int, model: str, nbytes: int, bound_bytes: int) -> None:
    """Raises ConfigError when updates of ``nbytes`` bytes need more disk space than the log was given."""
    smallest = FEWEST_SEGMENTS * 2 * record_bytes(nbytes)
    if smallest > bound_bytes:
        raise ConfigError(
            f"updates of model '{model}' do not fit into the log of shard {shard}",
            shard=str(shard),
            expected=f"--log-mb {-(-smallest // (1 << 20))} or more: six updates of {nbytes / 1e6:.1f} MB",
            actual=f"--log-mb {bound_bytes >> 20}",
            remedy="raise --log-mb or leave it out; with more shards updates are smaller",
        )
