"""The persisted state of a coordinator, and its encoding as rows of a journal."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from google.protobuf.message import DecodeError

from ps_protocol.cluster.exchange import ExchangeKey
from ps_protocol.cluster.view import Joined, JoinRequest, Member, MemberStatus
from ps_protocol.errors import DamagedData, InvalidRequest
from ps_protocol.model.spec import Consistency, ShardMap
from ps_protocol.records import fields_from, fields_of, from_plain, to_plain
from ps_protocol.wire.convert.exchange import exchange_record_from_bytes, exchange_record_to_bytes
from ps_protocol.wire.convert.model import shard_map_from_bytes, shard_map_to_bytes
from ps_server.coordinator.exchanges import CompleteExchange, ExchangeRecords
from ps_server.coordinator.membership.members import Key, SavedMember
from ps_server.coordinator.membership.scaling import WantedSize
from ps_server.coordinator.membership.state import MembershipRecords
from ps_server.coordinator.placement.state import Uses
from ps_server.coordinator.placement.variables import Balanced, FixedShards, MaxSize, MinSize
from ps_server.coordinator.publications import PublicationRecord
from ps_server.coordinator.settings import JobIdentity

_NO_EXCHANGES = ExchangeRecords()

_PARTITIONS = (Balanced, FixedShards, MinSize, MaxSize)

#: What is in the row of the cluster; the other fields have rows of their own.
_CLUSTER = (
    *("revision", "started", "finished", "released", "consistency", "shards", "spare"),
    *("moving", "released_models", "wanted"),
)
_JOINED = ("lease_seconds", "heartbeat_seconds", "revision", "phase")
_MEMBERSHIP = ("next_incarnation", "phase", "seen", "newest_state", "copies")


@dataclass(frozen=True, slots=True)
class ClusterRecords:
    """The persisted state of a coordinator, made by ``ClusterState.persisted_state`` for ``ClusterState.restore``.

    Not persisted: the times of heartbeats and the members' statistics (the next heartbeat brings them), and arrivals at
    a barrier (workers repeat them).
    """

    identity: JobIdentity
    revision: int
    started: bool
    finished: bool
    consistency: Consistency
    membership: MembershipRecords
    maps: Mapping[str, ShardMap]
    #: From DataLeases.persisted_state: numbers, texts, lists and dicts.
    data: Mapping[str, Any] = field(default_factory=dict)
    exchanges: ExchangeRecords = field(default_factory=ExchangeRecords)
    #: The number of shards: the initial and the added ones.
    shards: int = 1
    #: The shards without slices.
    spare: frozenset[int] = frozenset()
    #: The move of slices that was in progress. It does not continue; a new view informs the shards.
    moving: str = ""
    #: Models that were released, with the last epoch of their shard maps.
    released_models: Mapping[str, int] = field(default_factory=dict)
    #: The workers that use each model.
    uses: Uses = field(default_factory=dict)
    #: Whether the last data of a finished job is on disk.
    released: bool = False
    #: The size that was requested for the job.
    wanted: WantedSize = field(default_factory=WantedSize)
    #: Published weights, by name.
    publications: Mapping[str, PublicationRecord] = field(default_factory=dict)


def changed_rows(before: ClusterRecords | None, after: ClusterRecords) -> dict[str, bytes | None]:
    """Rows that lead a journal from ``before`` (None: empty) to ``after``; None stands for a row that is removed.

    Encodes only what changed: a thousand members that stay cost a thousand comparisons of identity.
    """
    old, new = _parts(before) if before else {}, _parts(after)
    rows: dict[str, bytes | None] = dict.fromkeys(old.keys() - new.keys())
    for key, part in new.items():
        if key not in old or (old[key] is not part and old[key] != part):
            rows[key] = _encode(part)
    return rows


def from_rows(rows: Mapping[str, bytes], where: str) -> ClusterRecords | None:
    """The records in the rows of the journal ``where``; None for an empty one. Raises DamagedData naming the row."""
    if not rows:
        return None
    reading = "cluster"
    try:
        cluster = json.loads(rows["cluster"])
        reading = "identity"
        identity = _identity_from(json.loads(rows["identity"]))
        reading = "gone"
        gone = from_plain(tuple[MemberStatus, ...], json.loads(rows["gone"]))
        reading = "data"
        data = json.loads(rows["data"])
        places, maps, complete, uses = {}, {}, {}, dict[str, Mapping[int, int]]()
        publications = dict[str, PublicationRecord]()
        for reading in rows:
            kind, _, name = reading.partition("/")
            if kind == "place":
                place = _place_from(json.loads(rows[reading]), identity.seed)
                places[place.joined.member.role, place.joined.member.index] = place
            elif kind == "map":
                maps[name] = shard_map_from_bytes(rows[reading])
            elif kind == "uses":
                uses[name] = from_plain(dict[int, int], json.loads(rows[reading]))
            elif kind == "publication":
                publications[name] = from_plain(PublicationRecord, json.loads(rows[reading]))
            elif kind == "exchange":
                ordinal, _, name = name.partition("/")
                complete[ExchangeKey(name, int(ordinal))] = CompleteExchange(*exchange_record_from_bytes(rows[reading]))
        reading = "exchanges"
        exchanges = _exchanges_from(json.loads(rows["exchanges"]), complete)
        reading = "cluster"
        records = _cluster_from(cluster, identity, places, maps, gone, data)
        return replace(records, exchanges=exchanges, uses=uses, publications=publications)
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError, InvalidRequest, DecodeError) as error:
        raise DamagedData(
            f"the journal {where} is damaged: its row '{reading}' cannot be read",
            actual=f"{type(error).__name__}: {error}",
            remedy="bring back a copy of the file, or move it away and begin a new job",
        ) from error


def _parts(records: ClusterRecords) -> dict[str, Any]:
    """The rows of ``records``, not encoded yet; a part that did not change is the same object or an equal one."""
    membership = records.membership
    parts: dict[str, Any] = {
        "identity": records.identity,
        "cluster": replace(
            records,
            membership=replace(membership, places={}, gone=()),
            maps={},
            data={},
            exchanges=_NO_EXCHANGES,
            uses={},
            publications={},
        ),
        "exchanges": replace(records.exchanges, complete={}),
        "gone": membership.gone,
        "data": records.data,
    }
    parts |= {f"place/{role.value}/{index}": place for (role, index), place in membership.places.items()}
    parts |= {f"exchange/{key.ordinal}/{key.name}": each for key, each in records.exchanges.complete.items()}
    parts |= {f"map/{name}": shard_map for name, shard_map in records.maps.items()}
    parts |= {f"uses/{name}": ranks for name, ranks in records.uses.items()}
    parts |= {f"publication/{name}": each for name, each in records.publications.items()}
    return parts


def _encode(part: Any) -> bytes:
    match part:
        case ShardMap():
            return shard_map_to_bytes(part)
        case CompleteExchange():
            return exchange_record_to_bytes(part.number, part.payloads)
        case ExchangeRecords():
            plain: Any = {"dropped": dict(part.dropped), "live": list(part.live.items()), "late": sorted(part.late)}
        case JobIdentity():
            plain = fields_of(part) | {"partition": [type(part.partition).__name__, to_plain(part.partition)]}
        case ClusterRecords():
            plain = to_plain({**_named(part, _CLUSTER), **_named(part.membership, _MEMBERSHIP)})
        case SavedMember():
            plain = _place_to(part)
        case PublicationRecord() | tuple():
            plain = to_plain(part)
        case _:
            plain = part
    return json.dumps(plain, separators=(",", ":")).encode()


def _exchanges_from(plain: dict[str, Any], complete: dict[ExchangeKey, CompleteExchange]) -> ExchangeRecords:
    others = fields_from(ExchangeRecords, {name: plain[name] for name in ("dropped", "late")})
    live = dict(from_plain(tuple[tuple[int, int], ...], plain["live"]))
    return ExchangeRecords(complete=complete, live=live, **others)


def _identity_from(plain: dict[str, Any]) -> JobIdentity:
    name, arguments = plain["partition"]
    rule: Any = from_plain({kind.__name__: kind for kind in _PARTITIONS}[name], arguments)
    return JobIdentity(partition=rule, **fields_from(JobIdentity, _without(plain, "partition")))


def _named(record: Any, names: Collection[str]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _without(plain: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in plain.items() if name not in names}


def _cluster_from(
    plain: dict[str, Any],
    identity: JobIdentity,
    places: dict[Key, SavedMember],
    maps: dict[str, ShardMap],
    gone: tuple[MemberStatus, ...],
    data: dict[str, Any],
) -> ClusterRecords:
    membership = fields_from(MembershipRecords, {name: plain[name] for name in _MEMBERSHIP})
    return ClusterRecords(
        identity=identity,
        membership=MembershipRecords(places=places, gone=gone, **membership),
        maps=maps,
        data=data,
        **fields_from(ClusterRecords, _without(plain, *_MEMBERSHIP)),
    )


def _place_to(place: SavedMember) -> dict[str, Any]:
    ask, joined = place.application, place.joined
    member = joined.member
    return {
        "applicant": to_plain(ask),
        "index": member.index,
        "incarnation": member.incarnation,
        **_named(joined, _JOINED),
    }


def _place_from(plain: dict[str, Any], seed: int) -> SavedMember:
    ask = from_plain(JoinRequest, plain["applicant"])
    member = fields_from(Member, {name: plain[name] for name in ("index", "incarnation")})
    joined = fields_from(Joined, {name: plain[name] for name in _JOINED})
    return SavedMember(ask, Joined(Member(role=ask.role, address=ask.address, **member), seed=seed, **joined))
