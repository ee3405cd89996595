"""Says what of a cluster's state outlives its coordinator, and how a journal's rows say it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from google.protobuf.message import DecodeError

from ps_protocol.convert import shard_map_from_pb, shard_map_to_pb
from ps_protocol.errors import DamagedData, InvalidRequest
from ps_protocol.model import Consistency, Mode, ShardMap, StalePolicy
from ps_protocol.v1 import common_pb2
from ps_protocol.view import Joined, Member, MemberStats, MemberStatus, Role
from ps_server.coordinator.applicant import Applicant, Copies
from ps_server.coordinator.placement import Balanced, FixedShards, MaxSize, MinSize
from ps_server.coordinator.settings import Identity

_PARTITIONS = (Balanced, FixedShards, MinSize, MaxSize)

Key = tuple[Role, int]
"""A place in the cluster: role and number."""


@dataclass(frozen=True, slots=True)
class Place:
    """A live member: what it asked and what it was told. One object for its whole life, so a change is a new one."""

    applicant: Applicant
    joined: Joined


@dataclass(frozen=True, slots=True)
class Memento:
    """All that a coordinator must know again. ``ClusterState.memento`` makes it, ``ClusterState.restore`` takes it.

    Not kept: when members were last heard of and their statistics (the next heartbeat brings them), and arrivals at a
    barrier (workers repeat them).
    """

    identity: Identity
    #: Handed out next; no process ever got it or a higher one.
    next_incarnation: int
    revision: int
    phase: int
    started: bool
    finished: bool
    consistency: Consistency
    #: Places that a start of the job does not wait for.
    seen: frozenset[Key]
    #: Per shard number, the incarnation that wrote the newest state known to be on a disk.
    newest_state: Mapping[int, int]
    places: Mapping[Key, Place]
    maps: Mapping[str, ShardMap]
    gone: tuple[MemberStatus, ...]
    #: What DataLeases.memento says: numbers, texts, lists and dicts.
    data: Mapping[str, Any] = field(default_factory=dict)
    #: Per shard number, the directories that hold that newest state.
    copies: Mapping[int, Copies] = field(default_factory=dict)
    #: How many numbers of shards there are: those the job began with, and those added.
    shards: int = 1
    #: Those of them that hold no slices.
    spare: frozenset[int] = frozenset()
    #: The move of slices that was under way. It is not continued, but shards have to be told so.
    moving: str = ""


def changed_rows(before: Memento | None, after: Memento) -> dict[str, bytes | None]:
    """Rows that lead a journal from ``before`` (None: empty) to ``after``; None stands for a row that goes.

    Encodes only what changed: a thousand members that stay cost a thousand comparisons of identity.
    """
    old, new = _parts(before) if before else {}, _parts(after)
    rows: dict[str, bytes | None] = dict.fromkeys(old.keys() - new.keys())
    for key, part in new.items():
        if key not in old or (old[key] is not part and old[key] != part):
            rows[key] = _encode(part)
    return rows


def from_rows(rows: Mapping[str, bytes], where: str) -> Memento | None:
    """What the rows of the journal ``where`` say; None for an empty one. Raises DamagedData naming the row."""
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
        places, maps = {}, {}
        for reading in rows:
            kind, _, name = reading.partition("/")
            if kind == "place":
                place = _place_from(json.loads(rows[reading]), identity.seed)
                places[place.joined.member.role, place.joined.member.index] = place
            elif kind == "map":
                maps[name] = shard_map_from_pb(common_pb2.ShardMap.FromString(rows[reading]))
        reading = "cluster"
        return _cluster_from(cluster, identity, places, maps, gone, data)
    except (LookupError, ValueError, TypeError, AttributeError, InvalidRequest, DecodeError) as error:
        raise DamagedData(
            f"the journal {where} is damaged: its row '{reading}' cannot be read",
            actual=f"{type(error).__name__}: {error}",
            remedy="bring back a copy of the file, or move it away and begin a new job",
        ) from error


def _parts(memento: Memento) -> dict[str, Any]:
    """The rows of ``memento``, not encoded yet; a part that did not change is the same object or an equal one."""
    parts: dict[str, Any] = {
        "identity": memento.identity,
        "cluster": replace(memento, places={}, maps={}, gone=(), data={}),
        "gone": memento.gone,
        "data": memento.data,
    }
    parts |= {f"place/{role.value}/{index}": place for (role, index), place in memento.places.items()}
    parts |= {f"map/{name}": shard_map for name, shard_map in memento.maps.items()}
    return parts


def _encode(part: Any) -> bytes:
    match part:
        case ShardMap():
            return shard_map_to_pb(part).SerializeToString(deterministic=True)
        case Identity():
            plain: Any = asdict(part) | {"partition": [type(part.partition).__name__, asdict(part.partition)]}
        case Memento():
            plain = _cluster_to(part)
        case Place():
            plain = _place_to(part)
        case tuple():
            plain = [_status_to(each) for each in part]
        case _:
            plain = part
    return json.dumps(plain, separators=(",", ":")).encode()


def _identity_from(plain: dict[str, Any]) -> Identity:
    name, arguments = plain["partition"]
    rule = {kind.__name__: kind for kind in _PARTITIONS}[name](**arguments)
    return Identity(plain["expected_shards"], plain["expected_workers"], rule, plain["seed"])


def _cluster_to(memento: Memento) -> dict[str, Any]:
    mode = memento.consistency
    return {
        "next_incarnation": memento.next_incarnation,
        "revision": memento.revision,
        "phase": memento.phase,
        "started": memento.started,
        "finished": memento.finished,
        "consistency": asdict(mode) | {"mode": mode.mode.value, "stale_policy": mode.stale_policy.value},
        "seen": sorted((role.value, index) for role, index in memento.seen),
        "newest_state": {str(shard): incarnation for shard, incarnation in memento.newest_state.items()},
        "copies": {str(shard): asdict(copies) for shard, copies in memento.copies.items()},
        "shards": memento.shards,
        "spare": sorted(memento.spare),
        "moving": memento.moving,
    }


def _cluster_from(
    plain: dict[str, Any],
    identity: Identity,
    places: dict[Key, Place],
    maps: dict[str, ShardMap],
    gone: tuple[MemberStatus, ...],
    data: dict[str, Any],
) -> Memento:
    mode = plain["consistency"]
    return Memento(
        identity=identity,
        next_incarnation=plain["next_incarnation"],
        revision=plain["revision"],
        phase=plain["phase"],
        started=plain["started"],
        finished=plain["finished"],
        consistency=Consistency(
            **mode | {"mode": Mode(mode["mode"]), "stale_policy": StalePolicy(mode["stale_policy"])}
        ),
        seen=frozenset((Role(role), index) for role, index in plain["seen"]),
        newest_state={int(shard): incarnation for shard, incarnation in plain["newest_state"].items()},
        places=places,
        maps=maps,
        gone=gone,
        data=data,
        copies={int(shard): Copies(**copies) for shard, copies in plain.get("copies", {}).items()},
        shards=plain.get("shards", identity.expected_shards),
        spare=frozenset(plain.get("spare", ())),
        moving=plain.get("moving", ""),
    )


def _place_to(place: Place) -> dict[str, Any]:
    ask, joined = place.applicant, place.joined
    member = joined.member
    return {
        "applicant": asdict(ask) | {"role": ask.role.value},
        "index": member.index,
        "incarnation": member.incarnation,
        "lease_seconds": joined.lease_seconds,
        "heartbeat_seconds": joined.heartbeat_seconds,
        "revision": joined.revision,
        "phase": joined.phase,
    }


def _place_from(plain: dict[str, Any], seed: int) -> Place:
    ask = Applicant(**plain["applicant"] | {"role": Role(plain["applicant"]["role"])})
    member = Member(ask.role, plain["index"], plain["incarnation"], ask.address)
    joined = Joined(member, plain["lease_seconds"], plain["heartbeat_seconds"], plain["revision"], seed, plain["phase"])
    return Place(ask, joined)


def _status_to(status: MemberStatus) -> dict[str, Any]:
    plain = asdict(status)
    return plain | {"member": plain["member"] | {"role": status.member.role.value}}


def _status_from(plain: dict[str, Any]) -> MemberStatus:
    member, stats = plain["member"], plain["stats"]
    member = Member(**member | {"role": Role(member["role"])})
    return MemberStatus(**plain | {"member": member, "stats": MemberStats(**stats)})
