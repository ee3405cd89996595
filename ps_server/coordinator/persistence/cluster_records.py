"""The persisted state of a coordinator, and its encoding as rows of a journal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from google.protobuf.message import DecodeError

from ps_protocol.cluster.exchange import ExchangeKey
from ps_protocol.cluster.view import Joined, JoinRequest, Member, MemberStats, MemberStatus, Role
from ps_protocol.cluster.weights import WeightsPiece, WeightsPin, WeightsVersion
from ps_protocol.errors import DamagedData, InvalidRequest
from ps_protocol.model.spec import Consistency, Mode, ShardMap, StalePolicy
from ps_protocol.records import fields_of
from ps_protocol.wire.convert.exchange import exchange_record_from_bytes, exchange_record_to_bytes
from ps_protocol.wire.convert.model import shard_map_from_bytes, shard_map_to_bytes
from ps_server.coordinator.exchanges import CompleteExchange, ExchangeRecords
from ps_server.coordinator.membership.admission import StateCopies
from ps_server.coordinator.membership.members import Key, SavedMember
from ps_server.coordinator.membership.scaling import WantedSize
from ps_server.coordinator.membership.state import MembershipRecords
from ps_server.coordinator.placement.state import Uses
from ps_server.coordinator.placement.variables import Balanced, FixedShards, MaxSize, MinSize
from ps_server.coordinator.publications import PublicationRecord
from ps_server.coordinator.settings import JobIdentity

_NO_EXCHANGES = ExchangeRecords()

_PARTITIONS = (Balanced, FixedShards, MinSize, MaxSize)


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
        gone = tuple(_status_from(each) for each in json.loads(rows["gone"]))
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
                uses[name] = {int(rank): life for rank, life in json.loads(rows[reading]).items()}
            elif kind == "publication":
                publications[name] = _publication_from(json.loads(rows[reading]))
            elif kind == "exchange":
                ordinal, _, name = name.partition("/")
                complete[ExchangeKey(name, int(ordinal))] = CompleteExchange(*exchange_record_from_bytes(rows[reading]))
        reading = "exchanges"
        exchanges = _exchanges_from(json.loads(rows["exchanges"]), complete)
        reading = "cluster"
        records = _cluster_from(cluster, identity, places, maps, gone, data)
        return replace(records, exchanges=exchanges, uses=uses, publications=publications)
    except (LookupError, ValueError, TypeError, AttributeError, InvalidRequest, DecodeError) as error:
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
            plain = fields_of(part) | {"partition": [type(part.partition).__name__, fields_of(part.partition)]}
        case ClusterRecords():
            plain = _cluster_to(part)
        case PublicationRecord():
            plain = _publication_to(part)
        case SavedMember():
            plain = _place_to(part)
        case tuple():
            plain = [_status_to(each) for each in part]
        case _:
            plain = part
    return json.dumps(plain, separators=(",", ":")).encode()


def _exchanges_from(plain: dict[str, Any], complete: dict[ExchangeKey, CompleteExchange]) -> ExchangeRecords:
    return ExchangeRecords(complete, plain["dropped"], dict(plain["live"]), frozenset(plain["late"]))


def _identity_from(plain: dict[str, Any]) -> JobIdentity:
    name, arguments = plain["partition"]
    rule = {kind.__name__: kind for kind in _PARTITIONS}[name](**arguments)
    return JobIdentity(**plain | {"partition": rule})


def _cluster_to(records: ClusterRecords) -> dict[str, Any]:
    mode, membership = records.consistency, records.membership
    return {
        "next_incarnation": membership.next_incarnation,
        "revision": records.revision,
        "phase": membership.phase,
        "started": records.started,
        "finished": records.finished,
        "released": records.released,
        "consistency": fields_of(mode) | {"mode": mode.mode.value, "stale_policy": mode.stale_policy.value},
        "seen": sorted((role.value, index) for role, index in membership.seen),
        "newest_state": {str(shard): incarnation for shard, incarnation in membership.newest_state.items()},
        "copies": {str(shard): fields_of(copies) for shard, copies in membership.copies.items()},
        "shards": records.shards,
        "spare": sorted(records.spare),
        "moving": records.moving,
        "released_models": dict(records.released_models),
        "wanted": _wanted_to(records.wanted),
    }


def _cluster_from(
    plain: dict[str, Any],
    identity: JobIdentity,
    places: dict[Key, SavedMember],
    maps: dict[str, ShardMap],
    gone: tuple[MemberStatus, ...],
    data: dict[str, Any],
) -> ClusterRecords:
    mode = plain["consistency"]
    return ClusterRecords(
        identity=identity,
        revision=plain["revision"],
        started=plain["started"],
        finished=plain["finished"],
        released=plain["released"],
        consistency=Consistency(
            **mode | {"mode": Mode(mode["mode"]), "stale_policy": StalePolicy(mode["stale_policy"])}
        ),
        membership=MembershipRecords(
            next_incarnation=plain["next_incarnation"],
            phase=plain["phase"],
            seen=frozenset((Role(role), index) for role, index in plain["seen"]),
            newest_state={int(shard): incarnation for shard, incarnation in plain["newest_state"].items()},
            copies={int(shard): StateCopies(**copies) for shard, copies in plain["copies"].items()},
            places=places,
            gone=gone,
        ),
        maps=maps,
        data=data,
        shards=plain["shards"],
        spare=frozenset(plain["spare"]),
        moving=plain["moving"],
        released_models=plain["released_models"],
        wanted=_wanted_from(plain["wanted"]),
    )


def _wanted_to(wanted: WantedSize) -> dict[str, Any]:
    plain = fields_of(wanted)
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in plain.items()}


def _wanted_from(plain: dict[str, Any]) -> WantedSize:
    values: dict[str, Any] = {name: frozenset(each) if isinstance(each, list) else each for name, each in plain.items()}
    return WantedSize(**values)


def _publication_to(record: PublicationRecord) -> dict[str, Any]:
    versions = [
        fields_of(version)
        | {"pieces": [fields_of(piece) | {"checksum": piece.checksum.hex()} for piece in version.pieces]}
        for version in record.versions
    ]
    return fields_of(record) | {"versions": versions, "pins": [fields_of(pin) for pin in record.pins]}


def _publication_from(plain: dict[str, Any]) -> PublicationRecord:
    versions = tuple(
        WeightsVersion(**version | {"pieces": tuple(_piece_from(piece) for piece in version["pieces"])})
        for version in plain["versions"]
    )
    pins = tuple(WeightsPin(**pin) for pin in plain["pins"])
    return PublicationRecord(**plain | {"versions": versions, "pins": pins})


def _piece_from(plain: dict[str, Any]) -> WeightsPiece:
    return WeightsPiece(**plain | {"checksum": bytes.fromhex(plain["checksum"])})


def _place_to(place: SavedMember) -> dict[str, Any]:
    ask, joined = place.application, place.joined
    member = joined.member
    return {
        "applicant": fields_of(ask) | {"role": ask.role.value},
        "index": member.index,
        "incarnation": member.incarnation,
        "lease_seconds": joined.lease_seconds,
        "heartbeat_seconds": joined.heartbeat_seconds,
        "revision": joined.revision,
        "phase": joined.phase,
    }


def _place_from(plain: dict[str, Any], seed: int) -> SavedMember:
    ask = JoinRequest(**plain["applicant"] | {"role": Role(plain["applicant"]["role"])})
    member = Member(ask.role, plain["index"], plain["incarnation"], ask.address)
    joined = Joined(member, plain["lease_seconds"], plain["heartbeat_seconds"], plain["revision"], seed, plain["phase"])
    return SavedMember(ask, joined)


def _status_to(status: MemberStatus) -> dict[str, Any]:
    member = fields_of(status.member) | {"role": status.member.role.value}
    return fields_of(status) | {"member": member, "stats": fields_of(status.stats)}


def _status_from(plain: dict[str, Any]) -> MemberStatus:
    member, stats = plain["member"], plain["stats"]
    member = Member(**member | {"role": Role(member["role"])})
    # What a former member held is not persisted.
    stats = MemberStats(**stats | {"log": None, "tables": (), "updates": ()})
    return MemberStatus(**plain | {"member": member, "stats": stats})
