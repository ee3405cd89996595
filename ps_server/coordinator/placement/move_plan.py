"""Decides which slices and buckets move to which shard, in which steps. It plans few moves, and is deterministic."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ps_protocol.cluster.view import ClusterView, Role
from ps_protocol.errors import InvalidRequest, NotReady, UnknownModel, UnknownShard
from ps_protocol.model.spec import ShardMap, Slice
from ps_server.coordinator.placement.tables import BucketPlace, bucket_moves
from ps_server.coordinator.placement.variables import LIMIT_PERCENT


@dataclass(frozen=True, slots=True)
class RelievedPiece:
    """One slice or bucket that leaves its shard."""

    model: str
    piece: Slice | BucketPlace


def pieces_to_move(maps: Mapping[str, ShardMap], shard: int, part: float) -> tuple[RelievedPiece, ...]:
    """About ``part`` of the contents of ``shard``: that part of each table's buckets, and slices of as many bytes.

    Slices are whole, the largest that fit first; none of a model whose slices are all larger.
    """
    found: list[RelievedPiece] = []
    for name in sorted(maps):
        found += [RelievedPiece(name, piece) for piece in _buckets(maps[name], shard, part)]
        found += [RelievedPiece(name, piece) for piece in _slices(maps[name], shard, part)]
    return tuple(found)


def _buckets(shard_map: ShardMap, shard: int, part: float) -> list[BucketPlace]:
    chosen: list[BucketPlace] = []
    for table, owners in enumerate(shard_map.tables):
        held = [BucketPlace(table, number, owner) for number, owner in enumerate(owners) if owner == shard]
        count = round(part * len(held))
        chosen += held[len(held) - count :]
    return chosen


def _slices(shard_map: ShardMap, shard: int, part: float) -> list[Slice]:
    sizes = [
        ((piece.row_end - piece.row_begin) * shard_map.spec.variables[piece.variable].row_bytes, at, piece)
        for at, piece in enumerate(shard_map.slices)
        if piece.shard == shard
    ]
    left = part * sum(size for size, _, _ in sizes)
    chosen: list[Slice] = []
    for size, _, piece in sorted(sizes, key=lambda each: (-each[0], -each[1])):
        if 0 < size <= left:
            chosen.append(piece)
            left -= size
    return chosen


BUCKET_BYTES = 4096
"""The least size that a bucket is planned with, and that of one of unknown size: an empty one has a cost, too."""

BucketBytes = Mapping[tuple[str, str], int]
"""About how many bytes one bucket of a table takes, by names of model and table."""

_UNKNOWN: BucketBytes = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class MoveRequest:
    """A caller's request to move slices and buckets; empty: balance."""

    #: Shards that have slices and buckets afterwards.
    to: tuple[int, ...] = ()
    #: Shards that are empty afterwards.
    drain: tuple[int, ...] = ()
    #: With ``variable``, the name of a variable or a table: only that one moves, to the one shard in ``to``.
    model: str = ""
    variable: str = ""
    #: If set, about ``part`` of this shard's contents moves to the one shard in ``to``, and nothing else.
    relieve: int | None = None
    part: float = 0.0


@dataclass(frozen=True, slots=True)
class MoveTarget:
    """A valid request, resolved for the current job."""

    #: The shards that are not empty afterwards, in order.
    shards: tuple[int, ...]
    #: Whether to balance; else only slices that have to leave their shard move.
    balance: bool
    #: If set, only this variable or table of this model moves, to ``to``.
    model: str = ""
    variable: str = ""
    to: int = 0
    #: If set, only these move, to ``to``; None: the fields above decide.
    pieces: tuple[RelievedPiece, ...] | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """One slice or bucket that moves to another shard. ``nbytes`` of a bucket are an estimate."""

    model: str
    piece: Slice | BucketPlace
    to: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class MoveBatch:
    """Moves that are made together, as the next shard map of each affected model."""

    maps: tuple[ShardMap, ...]
    receivers: frozenset[int]
    nbytes: int


def target_of(request: MoveRequest, view: ClusterView, maps: Mapping[str, ShardMap]) -> MoveTarget:
    """Resolve ``request`` for the current job.

    Raises UnknownShard, NotReady for a missing shard, UnknownModel, and InvalidRequest for an unknown variable or
    table, or if no shard would be left.
    """
    for number in (*request.to, *request.drain):
        if number >= view.expected_shards:
            raise UnknownShard(
                f"the job has no shard {number}",
                shard=str(number),
                expected=f"0 to {view.expected_shards - 1}",
                remedy=f"add it first: ps-server --shard {number} --add",
            )
    shards = tuple(sorted({*view.used_shards, *request.to} - set(request.drain)))
    if both := sorted({*request.to} & {*request.drain}):
        raise InvalidRequest(f"shard {both[0]} is named both as a target and to be drained", shard=str(both[0]))
    if not shards:
        raise InvalidRequest(
            "at least one shard has to hold the models",
            shard=", ".join(map(str, view.used_shards)),
            expected="one shard that is not drained",
            actual="all are to be drained",
            remedy=f"add one first: ps-server --shard {view.expected_shards} --add, then move with --to "
            f"{view.expected_shards}",
        )
    live = view.live(Role.SHARD)
    if away := [number for number in sorted({*view.used_shards, *request.to}) if number not in live]:
        raise NotReady("a shard is missing", shard=", ".join(map(str, away)), remedy="start it, then try again")
    if request.relieve is not None:
        return MoveTarget(shards, False, to=request.to[0], pieces=pieces_to_move(maps, request.relieve, request.part))
    if request.model or request.variable:
        return _target_of_variable(request, shards, maps)
    return MoveTarget(shards, balance=not request.drain)


def _target_of_variable(request: MoveRequest, shards: tuple[int, ...], maps: Mapping[str, ShardMap]) -> MoveTarget:
    if not (request.model and request.variable and len(request.to) == 1 and not request.drain):
        raise InvalidRequest("to move one variable, name its model, the variable, and one target shard")
    if request.model not in maps:
        known = ", ".join(f"'{name}'" for name in sorted(maps)) or "none yet"
        raise UnknownModel(f"no model '{request.model}' has been declared", expected=known)
    spec = maps[request.model].spec
    names = [v.name for v in spec.variables] + [table.name for table in spec.tables]
    if request.variable not in names:
        raise InvalidRequest(
            f"model '{request.model}' has no such variable or table",
            variable=request.variable,
            expected=", ".join(names[:5]) + (f" or one of {len(names) - 5} more" if len(names) > 5 else ""),
            remedy="give its name in the model, as in named_parameters() or cluster.embedding()",
        )
    return MoveTarget(shards, False, request.model, request.variable, request.to[0])


def plan(maps: Mapping[str, ShardMap], target: MoveTarget, bucket_bytes: BucketBytes = _UNKNOWN) -> list[Move]:
    """The moves that lead to ``target``, in order; empty once it is reached.

    Slices that must leave their shard go to the shard with the least of their model, largest first. Balancing moves
    slices from shards above the mean to the one with the least, until all are within 5 % of the mean or no single slice
    would help. A drain therefore moves only the bytes of the drained shards, and a new shard gets just its share.
    Buckets of tables are spread by count, table by table, independently; their bytes matter for the size of batches
    only.
    """
    if target.pieces is not None:
        return list(_relief_moves(maps, target.pieces, target.to, bucket_bytes))
    if target.model:
        return [
            _bucket_move(maps[target.model], piece, target.to, bucket_bytes)
            if isinstance(piece, BucketPlace)
            else Move(target.model, piece, target.to, _nbytes(maps[target.model], piece))
            for piece in _pieces(maps[target.model], target.variable)
            if piece.shard != target.to
        ]
    everything: Counter[int] = Counter()
    for shard_map in maps.values():
        everything.update(_loads(shard_map))
    moves: list[Move] = []
    for name in sorted(maps):
        moves += _Planner(maps[name], target.shards, everything).moves(target.balance)
        moves += [
            _bucket_move(maps[name], bucket, to, bucket_bytes)
            for bucket, to in bucket_moves(maps[name], target.shards, target.balance)
        ]
    return moves


def _relief_moves(
    maps: Mapping[str, ShardMap], pieces: Collection[RelievedPiece], to: int, bucket_bytes: BucketBytes
) -> Iterator[Move]:
    """Moves for the ``pieces`` that are still on their shard."""
    for each in pieces:
        shard_map, piece = maps.get(each.model), each.piece
        if shard_map is None:
            continue
        if isinstance(piece, BucketPlace):
            if shard_map.tables[piece.table][piece.number] == piece.shard:
                yield _bucket_move(shard_map, piece, to, bucket_bytes)
        elif piece in shard_map.slices:
            yield Move(each.model, piece, to, _nbytes(shard_map, piece))


def _pieces(shard_map: ShardMap, name: str) -> list[Slice | BucketPlace]:
    """All pieces of the variable or table of this name, in order; names are unique in a model."""
    spec = shard_map.spec
    slices = [piece for piece in shard_map.slices if spec.variables[piece.variable].name == name]
    buckets = [
        BucketPlace(table, number, owner)
        for table, owners in enumerate(shard_map.tables)
        if spec.tables[table].name == name
        for number, owner in enumerate(owners)
    ]
    return [*slices, *buckets]


def _bucket_move(shard_map: ShardMap, bucket: BucketPlace, to: int, bucket_bytes: BucketBytes) -> Move:
    spec = shard_map.spec
    nbytes = bucket_bytes.get((spec.name, spec.tables[bucket.table].name), 0)
    return Move(spec.name, bucket, to, max(BUCKET_BYTES, nbytes))


class _Planner:
    """The moves of one model's slices. ``everything``: bytes of all models by shard; updated."""

    def __init__(self, shard_map: ShardMap, shards: Sequence[int], everything: Counter[int]) -> None:
        self._map = shard_map
        self._shards = shards
        self._everything = everything
        self._loads = _loads(shard_map)
        self._held: defaultdict[int, list[Slice]] = defaultdict(list)
        for piece in shard_map.slices:
            self._held[piece.shard].append(piece)
        #: Moving slices, as placed now, and their new shards.
        self._to: dict[Slice, int] = {}

    def moves(self, balance: bool) -> list[Move]:
        leaving = [piece for piece in reversed(self._map.slices) if piece.shard not in self._shards]
        for piece in sorted(leaving, key=lambda s: -_nbytes(self._map, s)):
            self._move(piece, piece.shard, self._least())
        if balance:
            while step := self._evening():
                self._move(*step)
        return [
            Move(self._map.spec.name, piece, to, _nbytes(self._map, piece))
            for piece, to in self._to.items()
            if to != piece.shard
        ]

    def _least(self) -> int:
        return min(self._shards, key=lambda number: (self._loads[number], self._everything[number], number))

    def _evening(self) -> tuple[Slice, int, int] | None:
        """The next slice that balances loads, its source and its target; None if loads are balanced.

        Each move takes less than the difference from the larger shard, so the sum of squares falls and this terminates.
        """
        loads, count = self._loads, len(self._shards)
        total, least = sum(loads[number] for number in self._shards), self._least()
        largest = max(loads[number] for number in self._shards)
        spread = LIMIT_PERCENT - 100
        if 100 * count * largest <= (100 + spread) * total and 100 * count * loads[least] >= (100 - spread) * total:
            return None
        mean = total // count
        givers = sorted((n for n in self._shards if loads[n] > mean), key=lambda n: (-loads[n], n))
        for giver in givers:
            room = min(mean - loads[least], loads[giver] - mean)
            sizes = [(_nbytes(self._map, piece), piece) for piece in self._held[giver]]
            fitting = [(size, piece) for size, piece in sizes if 0 < size < loads[giver] - loads[least]]
            if fitting:
                # The largest that takes no shard across the mean, else the smallest; among equals the last in memory,
                # so that the remaining slices stay in place.
                within = [each for each in fitting if each[0] <= room]
                size = max(each[0] for each in within) if within else min(each[0] for each in fitting)
                return next(piece for each, piece in reversed(fitting) if each == size), giver, least
        return None

    def _move(self, piece: Slice, giver: int, to: int) -> None:
        self._to[piece] = to
        size = _nbytes(self._map, piece)
        self._held[giver].remove(piece)
        self._held[to].append(piece)
        for loads in (self._loads, self._everything):
            loads[giver] -= size
            loads[to] += size


def batches(maps: Mapping[str, ShardMap], moves: Collection[Move], batch_bytes: int) -> Iterator[MoveBatch]:
    """``moves`` in order, as many at a time as fit in ``batch_bytes``, at least one; each batch builds on those before
    it.
    """
    current = dict(maps)
    waiting: list[Move] = []
    for move in moves:
        if waiting and sum(each.nbytes for each in waiting) + move.nbytes > batch_bytes:
            yield _batch(current, waiting)
            waiting = []
        waiting.append(move)
    if waiting:
        yield _batch(current, waiting)


def _batch(current: dict[str, ShardMap], moves: Sequence[Move]) -> MoveBatch:
    """The batch of ``moves``; updates ``current``."""
    names = sorted({move.model for move in moves})
    for name in names:
        current[name] = _moved(current[name], [move for move in moves if move.model == name])
    return MoveBatch(
        tuple(current[name] for name in names),
        frozenset(move.to for move in moves),
        sum(move.nbytes for move in moves),
    )


def _moved(shard_map: ShardMap, moves: Sequence[Move]) -> ShardMap:
    to = {move.piece: move.to for move in moves}
    # Placed behind the slices of its next shard, which keep their place in memory unless one before them leaves.
    staying = [piece for piece in shard_map.slices if piece not in to]
    moving = [replace(piece, shard=to[piece]) for piece in shard_map.slices if piece in to]
    slices = sorted([*staying, *moving], key=lambda piece: piece.shard)
    tables = (
        tuple(to.get(BucketPlace(table, number, owner), owner) for number, owner in enumerate(owners))
        for table, owners in enumerate(shard_map.tables)
    )
    return replace(
        shard_map,
        epoch=shard_map.epoch + 1,
        shards=max(shard_map.shards, *(number + 1 for number in to.values())),
        slices=tuple(slices),
        tables=tuple(tables),
    )


def _loads(shard_map: ShardMap) -> Counter[int]:
    loads: Counter[int] = Counter()
    for piece in shard_map.slices:
        loads[piece.shard] += _nbytes(shard_map, piece)
    return loads


def _nbytes(shard_map: ShardMap, piece: Slice) -> int:
    return (piece.row_end - piece.row_begin) * shard_map.spec.variables[piece.variable].row_bytes
