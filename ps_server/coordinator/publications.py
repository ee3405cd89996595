"""Decides which versions of published weights there are, which are kept, and what a reader is told."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ps_protocol.cluster.weights import (
    NAME,
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
)
from ps_protocol.errors import InvalidRequest, VersionGone
from ps_server.coordinator.changes import StateChange

MOST_NAMES = 64
"""Names that a job publishes."""

MOST_KEPT = 1000
"""Versions of a name that a publisher may ask to be kept."""

MOST_PINS = 64
"""Pins of one name."""

LONGEST_PIN_SECONDS = 30 * 24 * 3600.0
"""A pin is renewed, or ends."""

MOST_METADATA_BYTES = 16 << 10
"""Of a version."""

MOST_READERS = 10_000
"""Readers that are remembered; those that have been silent for longest are forgotten."""

READER_SECONDS = 90.0
"""A reader counts, and the version it was told of is kept, for so long after it was heard of. It asks every 30 s."""

_MOST_LETTERS = 64
"""Of what a reader says of itself."""


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
    #: It was committed before, by the same ask.
    known: bool = False


@dataclass(slots=True)
class _Reader:
    """What a reader said last."""

    ask: FollowAsk
    heard_at: float
    #: The version it was told of and may be reading.
    reads: int = 0


class Publications:
    """Part of ClusterState: called from the driver's loop; does no I/O and reads no clock.

    ``now`` is seconds of the steady clock of the cluster, ``unix`` the same moment as Unix time. An event that raises
    has changed nothing. Numbers of versions rise by one and are never given again, also over ``restore``.
    """

    def __init__(self) -> None:
        self._names: dict[str, PublicationRecord] = {}
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

    def plan(self, ask: PublishAsk) -> PublishPlan:
        """What ``ask`` becomes. Changes nothing. Raises InvalidRequest for one that cannot be published."""
        _check(ask)
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
        if known.token == ask.token:
            return PublishPlan(known.newest, (), known=True)
        return PublishPlan(known.newest + 1, tuple(each.number for each in known.versions))

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
        version = WeightsVersion(number, ask.model, ask.step, ask.metadata, unix, tuple(pieces))
        after = replace(
            known,
            model=ask.model,
            keep=ask.keep,
            newest=number,
            versions=(*known.versions, version),
            token=ask.token,
        )
        kept = frozenset(self._kept(after, now, unix))
        self._names[ask.name] = replace(
            after,
            versions=tuple(each for each in after.versions if each.number in kept),
            pins=tuple(pin for pin in after.pins if pin.until_seconds > unix and pin.number in kept),
        )
        return StateChange(version, f"version {number} of '{ask.name}' is published: step {ask.step}")

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
        """The version of ``name`` that was committed last. Raises InvalidRequest, VersionGone."""
        known = self._known(name)
        return self._find(known, known.newest)

    def drop_model(self, model: str) -> StateChange[None]:
        """``model`` was released: so are the versions that were published from it, whose numbers are never used again.

        A later model of that name, or another one, may be published under the names.
        """
        ended = [name for name, known in self._names.items() if known.model == model and known.versions]
        for name in ended:
            self._names[name] = replace(self._names[name], model="", versions=(), pins=())
        names = ", ".join(f"'{name}'" for name in ended)
        return StateChange(None, f"the versions of {names} are gone with model '{model}'" if ended else "")

    # -- pins

    def pin(self, name: str, pin: WeightsPin, seconds: float, unix: float) -> StateChange[None]:
        """Keep a version for ``seconds`` from now; 0: no longer for this holder.

        Raises InvalidRequest, VersionGone for a version that was removed.
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

        Raises InvalidRequest for a version that there has never been, or another name where one version is asked for,
        VersionGone where that was removed or a piece of it is lost.
        """
        _check_name(ask.name)
        ask = replace(ask, reader=ask.reader[:_MOST_LETTERS], host=ask.host[:_MOST_LETTERS])
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
            if ask.have and (known is None or ask.have > known.newest):
                raise InvalidRequest(
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

    def states(self, homes: Mapping[int, ShardHome], now: float) -> tuple[WeightsState, ...]:
        """Everything, for people."""
        live: dict[str, list[WeightsReader]] = {name: [] for name in self._names}
        for (name, reader), heard in self._readers.items():
            silent = now - heard.heard_at
            if name in live and silent < READER_SECONDS:
                ask = heard.ask
                live[name].append(
                    WeightsReader(reader, ask.host, ask.pid, ask.have, ask.delta_bytes, ask.full_bytes, silent)
                )
        return tuple(
            WeightsState(
                name,
                known.model,
                known.keep,
                known.newest,
                known.versions,
                known.pins,
                tuple(live[name]),
                tuple(each.number for each in known.versions if lost_piece(each, homes)),
            )
            for name, known in sorted(self._names.items())
        )

    def _known(self, name: str) -> PublicationRecord:
        if name not in self._names:
            raise InvalidRequest(
                f"nothing is published under the name '{name}'",
                expected=", ".join(sorted(self._names)) or "a name that was given to cluster.publish()",
                actual=name,
            )
        return self._names[name]

    @staticmethod
    def _find(known: PublicationRecord, number: int) -> WeightsVersion:
        if not 0 < number <= known.newest:
            raise InvalidRequest(
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


def _check_name(name: str) -> None:
    """Raises InvalidRequest."""
    if not NAME.fullmatch(name):
        raise InvalidRequest(
            "this is no name for what is published",
            expected="1 to 64 letters, digits, '.', '_' and '-', the first not '.' or '-'",
            actual=repr(name[:100]),
        )


def _check(ask: PublishAsk) -> None:
    """Raises InvalidRequest."""
    _check_name(ask.name)
    if not 1 <= ask.keep <= MOST_KEPT:
        raise InvalidRequest("so many versions are not kept", expected=f"1 to {MOST_KEPT}", actual=str(ask.keep))
    if not ask.token:
        raise InvalidRequest("a version is published with a token", remedy="use the same torch-ps on both sides")
    if len(ask.metadata.encode()) > MOST_METADATA_BYTES:
        raise InvalidRequest(
            "the metadata of a version is too large",
            expected=f"at most {MOST_METADATA_BYTES} bytes of JSON",
            actual=f"{len(ask.metadata.encode())} bytes",
        )
    try:
        is_object = isinstance(json.loads(ask.metadata or "{}"), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise InvalidRequest("the metadata of a version is a JSON object", expected="{...}", actual=ask.metadata[:100])
