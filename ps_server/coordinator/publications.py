"""Decides which versions of published weights there are, which are kept, and what a reader is told."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import Any

from ps_protocol.cluster.weights import (
    NOBODY,
    FollowAnswer,
    FollowAsk,
    PublishAsk,
    ShardHome,
    WeightsPiece,
    WeightsPin,
    WeightsReader,
    WeightsState,
    WeightsVersion,
    check_metadata_size,
    check_name,
)
from ps_protocol.errors import InvalidRequest, UnknownVersion, VersionGone
from ps_server.coordinator.changes import StateChange

MOST_NAMES = 64
"""Names that a job publishes."""

MOST_KEPT = 1000
"""Versions of a name that a publisher may ask to be kept."""

MOST_KEPT_BYTES = 4 << 20
"""Of the versions of a name that a publisher asks to be kept, as the journal has them, all in one row."""

_VERSION_BYTES, _PIECE_BYTES = 200, 200
"""At most, of what the journal has of one version beside its metadata, and of one piece."""

_MADE = 16
"""Versions of a name whose requests are remembered, to be known when they come again."""

MOST_PINS = 64
"""Pins of one name."""

LONGEST_PIN_SECONDS = 30 * 24 * 3600.0
"""A pin is renewed, or ends."""

_MOST_NESTED = 64
"""Objects and lists within each other, in the metadata of a version: programs that read it do so by recursion."""

SHOWN_READERS = 100
"""Of a name, the readers that are told to people: those that are furthest behind."""

MOST_READERS = 10_000
"""Readers that are remembered; those that have been silent for longest are forgotten."""

READER_SECONDS = 90.0
"""A reader counts, and the version it was told of is kept, for so long after it was heard of. It asks every 30 s."""

_MOST_LETTERS = 64
_MOST_BYTES = 1 << 50
_MOST_BEHIND = 100_000
"""Of what a reader says of itself, the last one of a relay. The sums over all readers fit into 64 and 32 bits."""


@dataclass(frozen=True, slots=True)
class PublicationRecord:
    """One name, as the journal has it. Versions by rising number."""

    name: str
    #: Empty: it was released.
    model: str
    keep: int
    #: The number of the last version committed.
    newest: int = 0
    versions: tuple[WeightsVersion, ...] = ()
    pins: tuple[WeightsPin, ...] = ()
    #: Of the last version committed: the same ask gets it again.
    token: str = ""


@dataclass(frozen=True, slots=True)
class PublishPlan:
    """The version that an ask becomes."""

    number: int
    #: The versions that are there; shards remove all others, but not these before it is committed.
    kept: tuple[int, ...]
    #: The shards that hold pieces of these.
    holders: frozenset[int] = frozenset()
    #: The version that the same ask has become before; None: it has become none yet.
    made: WeightsVersion | None = None


@dataclass(slots=True)
class _Reader:
    """What a reader said last."""

    ask: FollowAsk
    heard_at: float
    #: The version it was told of and may be reading.
    reads: int = 0


def _has(reader: _Reader) -> int:
    return reader.ask.have


def _told(reader: _Reader, now: float) -> WeightsReader:
    ask = reader.ask
    silent = now - reader.heard_at
    received = ask.delta_bytes, ask.full_bytes
    return WeightsReader(ask.reader, ask.host, ask.pid, ask.have, *received, silent, ask.saved_bytes, ask.readers)


class Publications:
    """Part of ClusterState: called from the driver's loop; does no I/O and reads no clock.

    ``now`` is seconds of the steady clock of the cluster, ``unix`` the same moment as Unix time. An event that raises
    has changed nothing. Numbers of versions rise by one and are never given again, also over ``restore``.
    """

    def __init__(self, job_id: str = "") -> None:
        """``job_id``: of the job, which its versions have; empty: readers cannot tell them from those of others."""
        self._job_id = job_id
        self._names: dict[str, PublicationRecord] = {}
        #: By name and token, the last versions in the order of their commits. Not persisted: what is held up on its way
        #: ends with the coordinator that it was for.
        self._made: dict[str, dict[str, WeightsVersion]] = {}
        #: By name and reader, the one heard of last at the end. Not persisted: a reader asks again.
        self._readers: dict[tuple[str, str], _Reader] = {}

    def restore(self, records: Mapping[str, PublicationRecord]) -> None:
        """Restore the names of ``records``."""
        self._names = dict(records)

    @property
    def records(self) -> Mapping[str, PublicationRecord]:
        """For ``restore``."""
        return dict(self._names)

    # -- publishing

    def plan(self, ask: PublishAsk, shards: int) -> PublishPlan:
        """What ``ask`` becomes, whose model is on so many ``shards``. Changes nothing.

        Raises InvalidRequest for one that cannot be published.
        """
        _check(ask, shards)
        known = self._names.get(ask.name)
        if known is None:
            if len(self._names) >= MOST_NAMES:
                raise InvalidRequest(
                    "this job publishes as many names as it may",
                    expected=f"at most {MOST_NAMES}",
                    remedy="publish under a name that is there",
                )
            return PublishPlan(1, ())
        if known.model not in ("", ask.model):
            raise InvalidRequest(
                f"'{ask.name}' is published from another model",
                expected=f"model '{known.model}'",
                actual=f"model '{ask.model}'",
                remedy="give each model its own name",
            )
        # A request that the network held up may come when later versions are committed.
        made = self._made.get(ask.name, {}).get(ask.token)
        if made is None and known.token == ask.token:
            made = self.newest(ask.name)
        if made is not None:
            return PublishPlan(made.number, (), made=made)
        holders = frozenset(piece.shard for version in known.versions for piece in version.pieces)
        return PublishPlan(known.newest + 1, tuple(each.number for each in known.versions), holders)

    def commit(
        self, ask: PublishAsk, number: int, pieces: Iterable[WeightsPiece], now: float, unix: float
    ) -> StateChange[WeightsVersion]:
        """The version that ``plan`` gave ``number`` is whole; the oldest ones that nobody wants go.

        Raises InvalidRequest when another one was committed meanwhile.
        """
        known = self._names.get(ask.name) or PublicationRecord(ask.name, ask.model, ask.keep)
        if number != known.newest + 1 or known.model not in ("", ask.model):
            raise InvalidRequest(
                f"another version of '{ask.name}' was committed meanwhile",
                expected=f"version {known.newest + 1}",
                actual=f"version {number}",
                remedy="publish again",
            )
        version = WeightsVersion(number, ask.model, ask.step, ask.metadata, unix, tuple(pieces), self._job_id)
        after = replace(
            known,
            model=ask.model,
            keep=ask.keep,
            newest=number,
            versions=(*known.versions, version),
            token=ask.token,
        )
        self._settle(after, now, unix)
        made = self._made.setdefault(ask.name, {})
        made[ask.token] = version
        if len(made) > _MADE:
            del made[next(iter(made))]
        return StateChange(version, f"version {number} of '{ask.name}' is published: step {ask.step}")

    def adopt(self, name: str, version: WeightsVersion, keep: int, now: float, unix: float) -> tuple[int, ...]:
        """A relay has ``version``, which was committed elsewhere: the numbers of all that it keeps now.

        Numbers rise, and some may be missing. Versions of another job go.
        """
        known = self._names.get(name) or PublicationRecord(name, version.model, keep)
        older = [
            each for each in known.versions if (each.job_id, known.newest < version.number) == (version.job_id, True)
        ]
        after = replace(known, model=version.model, keep=keep, newest=version.number, versions=(*older, version))
        return tuple(each.number for each in self._settle(after, now, unix).versions)

    def number_of(self, name: str) -> int:
        """The number of the newest version of ``name``; 0: there is none."""
        known = self._names.get(name)
        return known.newest if known else 0

    def forget(self, name: str) -> None:
        """A relay has nothing of ``name`` any more."""
        self._names.pop(name, None)

    def _settle(self, after: PublicationRecord, now: float, unix: float) -> PublicationRecord:
        """Take over ``after`` without what nobody wants."""
        kept = frozenset(self._kept(after, now, unix))
        settled = self._names[after.name] = replace(
            after,
            versions=tuple(each for each in after.versions if each.number in kept),
            pins=tuple(pin for pin in after.pins if pin.until_seconds > unix and pin.number in kept),
        )
        return settled

    def _kept(self, known: PublicationRecord, now: float, unix: float) -> tuple[int, ...]:
        """The newest versions, those that are pinned, and some that readers are reading."""
        numbers = [each.number for each in known.versions]
        kept = set(numbers[-known.keep :])
        kept.update(pin.number for pin in known.pins if pin.until_seconds > unix)
        reading = {
            reader.reads
            for (name, _), reader in self._readers.items()
            if name == known.name and now - reader.heard_at < READER_SECONDS
        }
        # Bounded: as many as are kept anyway, the newest ones.
        kept.update(sorted(reading - kept, reverse=True)[: known.keep])
        return tuple(number for number in numbers if number in kept)

    def newest(self, name: str) -> WeightsVersion:
        """The version of ``name`` that was committed last. Raises UnknownVersion, VersionGone."""
        known = self._known(name)
        return self._find(known, known.newest)

    def drop_model(self, model: str) -> StateChange[None]:
        """``model`` was released: so are the versions that were published from it, whose numbers are never used again.

        A later model of that name, or another one, may be published under the names.
        """
        ended = [name for name, known in self._names.items() if known.model == model and known.versions]
        for name in ended:
            self._names[name] = replace(self._names[name], model="", versions=(), pins=())
            self._made.pop(name, None)
        names = ", ".join(f"'{name}'" for name in ended)
        return StateChange(None, f"the versions of {names} are gone with model '{model}'" if ended else "")

    # -- pins

    def pin(self, name: str, pin: WeightsPin, seconds: float, unix: float) -> StateChange[None]:
        """Keep a version for ``seconds`` from now; 0: no longer for this holder.

        Raises UnknownVersion, VersionGone for a version that was removed, InvalidRequest for another time.
        """
        known = self._known(name)
        if not 0 <= seconds <= LONGEST_PIN_SECONDS:
            raise InvalidRequest(
                "a version is not kept for so long",
                expected=f"0 to {LONGEST_PIN_SECONDS:g} seconds",
                actual=f"{seconds:g} seconds",
                remedy="renew the pin before it ends",
            )
        others = tuple(
            each
            for each in known.pins
            if (each.number, each.holder) != (pin.number, pin.holder) and each.until_seconds > unix
        )
        if seconds == 0:
            self._names[name] = replace(known, pins=others)
            done = len(others) < len(known.pins)
            return StateChange(None, f"version {pin.number} of '{name}' is not pinned any more" if done else "")
        self._find(known, pin.number)
        if len(others) >= MOST_PINS:
            raise InvalidRequest(
                f"'{name}' has as many pins as it may", expected=f"at most {MOST_PINS}", remedy="remove one first"
            )
        self._names[name] = replace(known, pins=(*others, replace(pin, until_seconds=unix + seconds)))
        return StateChange(None, f"version {pin.number} of '{name}' is pinned for {seconds:g} s")

    # -- reading

    def follow(self, ask: FollowAsk, homes: Mapping[int, ShardHome], now: float, *, finished: bool) -> FollowAnswer:
        """What a reader is told: the newest version of which no piece is lost, if that is above the one it has.

        Raises UnknownVersion for a version that there has never been, VersionGone where one that is asked for was
        removed or a piece of it is lost, InvalidRequest for what is no name.
        """
        check_name(ask.name)
        ask = replace(
            ask,
            reader=ask.reader[:_MOST_LETTERS],
            host=ask.host[:_MOST_LETTERS],
            job_id=ask.job_id[:_MOST_LETTERS],
            readers=min(ask.readers, _MOST_BEHIND),
            **{each: min(getattr(ask, each), _MOST_BYTES) for each in ("delta_bytes", "full_bytes", "saved_bytes")},
        )
        key = ask.name, ask.reader
        before = self._readers.pop(key, None)
        if ask.leaves:
            return FollowAnswer(None, {}, 0, finished)
        known = self._names.get(ask.name)
        if ask.number:
            found = self._find(self._known(ask.name), ask.number)
            if why := lost_piece(found, homes):
                raise VersionGone(
                    f"version {ask.number} of '{ask.name}' is gone: {why}", remedy="read the newest version"
                )
            version: WeightsVersion | None = found
        else:
            if ask.have and ask.job_id and self._job_id and ask.job_id != self._job_id:
                raise UnknownVersion(
                    f"version {ask.have} of '{ask.name}' is of another job",
                    expected=f"a version of job {self._job_id}",
                    actual=f"one of job {ask.job_id}",
                    remedy="read without one: the reader then gets the whole newest version",
                )
            if ask.have and (known is None or ask.have > known.newest):
                raise UnknownVersion(
                    f"'{ask.name}' has no version {ask.have} in this job",
                    expected=f"at most version {known.newest if known else 0}",
                    actual=f"version {ask.have}",
                    remedy="read without one: the reader then gets the whole newest version",
                )
            whole = (v for v in reversed(known.versions if known else ()) if not lost_piece(v, homes))
            version = next(whole, None)
            if version is not None and version.number <= ask.have:
                version = None
        reads = version.number if version else 0
        self._readers[key] = _Reader(ask, now, reads or (before.reads if before and not ask.have else 0))
        while len(self._readers) > MOST_READERS:
            del self._readers[next(iter(self._readers))]
        addresses = {p.shard: homes[p.shard].address for p in version.pieces if p.shard in homes} if version else {}
        return FollowAnswer(version, addresses, known.newest if known else 0, finished)

    def count_readers(self, name: str, now: float) -> int:
        """How many read ``name``, with those behind relays."""
        live = (
            heard for (of, _), heard in self._readers.items() if of == name and now - heard.heard_at < READER_SECONDS
        )
        return sum(1 + heard.ask.readers for heard in live)

    def states(
        self, homes: Mapping[int, ShardHome], now: float, shown_readers: int = SHOWN_READERS
    ) -> tuple[WeightsState, ...]:
        """Everything, for people and metrics; of each name so many readers at most."""
        live: dict[str, list[_Reader]] = {name: [] for name in self._names}
        for (name, _), heard in self._readers.items():
            if name in live and now - heard.heard_at < READER_SECONDS:
                live[name].append(heard)
        return tuple(
            WeightsState(
                name,
                known.model,
                known.keep,
                known.newest,
                known.versions,
                known.pins,
                tuple(_told(each, now) for each in nsmallest(shown_readers, live[name], key=_has)),
                tuple(each.number for each in known.versions if lost_piece(each, homes)),
                reader_count=len(live[name]),
                most_behind=max((max(0, known.newest - _has(each)) for each in live[name]), default=0),
                delta_bytes=sum(each.ask.delta_bytes for each in live[name]),
                full_bytes=sum(each.ask.full_bytes for each in live[name]),
                saved_bytes=sum(each.ask.saved_bytes for each in live[name]),
                relayed_readers=sum(each.ask.readers for each in live[name]),
            )
            for name, known in sorted(self._names.items())
        )

    def _known(self, name: str) -> PublicationRecord:
        if name not in self._names:
            raise UnknownVersion(
                f"nothing is published under the name '{name}'",
                expected=", ".join(sorted(self._names)) or "a name that was given to cluster.publish()",
                actual=name,
            )
        return self._names[name]

    @staticmethod
    def _find(known: PublicationRecord, number: int) -> WeightsVersion:
        if not 0 < number <= known.newest:
            raise UnknownVersion(
                f"'{known.name}' has no version {number}",
                expected=f"1 to {known.newest}",
                actual=str(number),
            )
        for version in known.versions:
            if version.number == number:
                return version
        kept = ", ".join(str(version.number) for version in known.versions)
        raise VersionGone(
            f"version {number} of '{known.name}' was removed",
            expected=f"one of {kept}" if kept else "no version is there",
            actual=str(number),
            remedy="read the newest version; publish() keeps as many as its argument keep says",
        )


def lost_piece(version: WeightsVersion, homes: Mapping[int, ShardHome]) -> str:
    """Why ``version`` cannot be read any more; empty: it can, or can again when its shards are back."""
    for piece in version.pieces:
        home = homes.get(piece.shard)
        if home == NOBODY:
            return f"shard {piece.shard}, which held a part of it, has left the job"
        if piece.directory:
            if home is not None and home.directory != piece.directory:
                return f"shard {piece.shard} has another data directory than when it was published"
        elif home is None or home.incarnation != piece.incarnation:
            return f"shard {piece.shard}, which held it in memory, has ended"
    return ""


def _check(ask: PublishAsk, shards: int) -> None:
    """Raises InvalidRequest."""
    check_name(ask.name)
    if not 1 <= ask.keep <= MOST_KEPT:
        raise InvalidRequest("so many versions are not kept", expected=f"1 to {MOST_KEPT}", actual=str(ask.keep))
    if not ask.token:
        raise InvalidRequest("a version is published with a token", remedy="use the same torch-ps on both sides")
    check_metadata_size(ask.metadata)
    # As the journal writes it: quotes have a backslash there.
    row_bytes = _VERSION_BYTES + len(json.dumps(ask.metadata)) + shards * _PIECE_BYTES
    if ask.keep * row_bytes > MOST_KEPT_BYTES:
        raise InvalidRequest(
            "so many versions with so much metadata are not kept",
            expected=f"keep at most {max(1, MOST_KEPT_BYTES // row_bytes)}, or less metadata",
            actual=f"keep {ask.keep}, {len(ask.metadata.encode())} bytes of metadata, {shards} shards",
            remedy="keep fewer versions, or write the metadata elsewhere and publish where it is",
        )
    try:
        metadata = json.loads(ask.metadata or "{}")
    except (ValueError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict) or _is_nested_deeper(metadata, _MOST_NESTED):
        raise InvalidRequest(
            "the metadata of a version is a JSON object",
            expected=f"{{...}}, at most {_MOST_NESTED} objects and lists within each other",
            actual=ask.metadata[:100],
        )


def _is_nested_deeper(value: dict[str, Any], most: int) -> bool:
    """Whether more than ``most`` objects and lists are within each other, with ``value``."""
    level: list[Any] = [value]
    for _ in range(most):
        inner = (each for outer in level for each in (outer.values() if isinstance(outer, dict) else outer))
        level = [each for each in inner if isinstance(each, dict | list)]
    return bool(level)
