"""Published weights of a job at a glance, and the readers that are furthest behind."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ps_protocol.cluster.history import JobHistory

READERS = 50
"""Readers that are shown, of all names together: a job may have thousands."""

_HOST_LETTERS = 64


@dataclass(frozen=True, slots=True)
class PublicationGlance:
    """One name, with its newest version that can be read."""

    name: str
    model: str
    #: 0: none can be read.
    version: int
    step: int
    #: When it was published, in seconds since 1970; 0 without one.
    at_seconds: float
    size_bytes: int
    readers: int
    #: Readers that relays serve, beside these.
    relayed: int
    #: Versions that the last of all readers has not got.
    behind: int
    #: That all these readers have received as deltas and whole, and what they did not have to receive.
    delta_bytes: int
    full_bytes: int
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class ReaderGlance:
    """One reader of a name."""

    #: Host and process; unlike that of any other.
    name: str
    publication: str
    #: That it has; 0: none.
    version: int
    behind: int
    delta_bytes: int
    full_bytes: int
    saved_bytes: int
    #: Of a relay: how many read from it.
    serves: int


def publications_of(history: JobHistory) -> tuple[PublicationGlance, ...]:
    """By name."""
    found = []
    for state in history.publications:
        newest = state.readable
        found.append(
            PublicationGlance(
                name=state.name,
                model=state.model,
                version=newest.number if newest else 0,
                step=newest.step if newest else 0,
                at_seconds=newest.at_seconds if newest else 0.0,
                size_bytes=newest.size_bytes if newest else 0,
                readers=state.reader_count,
                relayed=state.relayed_readers,
                behind=state.most_behind,
                delta_bytes=state.delta_bytes,
                full_bytes=state.full_bytes,
                saved_bytes=state.saved_bytes,
            )
        )
    return tuple(found)


def readers_of(history: JobHistory) -> tuple[ReaderGlance, ...]:
    """At most READERS, the ones furthest behind first."""
    known = [(state, reader) for state in history.publications for reader in state.readers]
    known.sort(key=lambda each: -each[0].behind(each[1]))
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for state, reader in known[:READERS]:
        name = f"{reader.host[:_HOST_LETTERS] or 'unknown host'} ({reader.pid})"
        seen[state.name, name] += 1
        if (number := seen[state.name, name]) > 1:
            name += f" #{number}"
        received = reader.delta_bytes, reader.full_bytes, reader.saved_bytes
        found.append(ReaderGlance(name, state.name, reader.have, state.behind(reader), *received, reader.readers))
    return tuple(found)
