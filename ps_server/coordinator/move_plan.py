"""Decides which slices move to which shard, and in which steps: few moves, the same for the same input; no I/O."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ps_protocol.errors import InvalidRequest, NotReady, UnknownModel, UnknownShard
from ps_protocol.model import ShardMap, Slice
from ps_protocol.view import ClusterView, Role
from ps_server.coordinator.placement import LIMIT_PERCENT, in_arena_order

BATCH_BYTES = 64 << 20
"""Slices that move while training holds still once, where nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What somebody wants moved; all of it empty: balance anew."""

    #: Shards that hold slices from then on.
    to: tuple[int, ...] = ()
    #: Shards that hold none from then on.
    drain: tuple[int, ...] = ()
    #: With ``variable``: only that one moves, to the one shard in ``to``.
    model: str = ""
    variable: str = ""


@dataclass(frozen=True, slots=True)
class Goal:
    """A wish that can be fulfilled."""

    #: The shards that hold slices then, in order.
    shards: tuple[int, ...]
    #: Even out what is uneven; else only what has to leave its shard moves.
    balance: bool
    #: Set: only this variable of this model moves, to ``to``.
    model: str = ""
    variable: int = 0
    to: int = 0


@dataclass(frozen=True, slots=True)
class Move:
    """One slice that goes to another shard."""

    model: str
    piece: Slice
    to: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Slices that move together, as the next shard map of each model that has one of them."""

    maps: tuple[ShardMap, ...]
    receivers: frozenset[int]
    nbytes: int


def goal_of(wish: Wish, view: ClusterView, maps: Mapping[str, ShardMap]) -> Goal:
    """What ``wish`` means for the job as it is.

    Raises UnknownShard, NotReady for a shard that is away, UnknownModel, and InvalidRequest for a variable that is not
    there, or when no shard would be left.
    """
    for number in (*wish.to, *wish.drain):
        if number >= view.expected_shards:
            raise UnknownShard(
                f"the job has no shard {number}",
                shard=str(number),
                expected=f"0 to {view.expected_shards - 1}",
                remedy=f"add it first: ps-server --shard {number} --add",
            )
    shards = tuple(sorted({*view.used_shards, *wish.to} - set(wish.drain)))
    if both := sorted({*wish.to} & {*wish.drain}):
        raise InvalidRequest(f"slices cannot move both to shard {both[0]} and away from it", shard=str(both[0]))
    if not shards:
        raise InvalidRequest(
            "somebody has to hold the model",
            shard=", ".join(map(str, view.used_shards)),
            expected="one shard that is not drained",
            actual="all are to be drained",
            remedy=f"add one first: ps-server --shard {view.expected_shards} --add, then move with --to "
            f"{view.expected_shards}",
        )
    live = view.live(Role.SHARD)
    if away := [number for number in sorted({*view.used_shards, *wish.to}) if number not in live]:
        raise NotReady("a shard is away", shard=", ".join(map(str, away)), remedy="start it, then try again")
    if wish.model or wish.variable:
        return _goal_of_variable(wish, shards, maps)
    return Goal(shards, balance=not wish.drain)


def _goal_of_variable(wish: Wish, shards: tuple[int, ...], maps: Mapping[str, ShardMap]) -> Goal:
    if not (wish.model and wish.variable and len(wish.to) == 1 and not wish.drain):
        raise InvalidRequest("one variable moves by the name of its model, its own, and the number of one shard")
    if wish.model not in maps:
        known = ", ".join(f"'{name}'" for name in sorted(maps)) or "none yet"
        raise UnknownModel(f"no model '{wish.model}' has been declared", expected=known)
    names = [variable.name for variable in maps[wish.model].spec.variables]
    if wish.variable not in names:
        raise InvalidRequest(
            f"model '{wish.model}' has no such variable",
            variable=wish.variable,
            expected=", ".join(names[:5]) + (f" or one of {len(names) - 5} more" if len(names) > 5 else ""),
            remedy="give the name it has in the model, as named_parameters() tells it",
        )
    return Goal(shards, False, wish.model, names.index(wish.variable), wish.to[0])


def plan(maps: Mapping[str, ShardMap], goal: Goal) -> list[Move]:
    """What has to move for ``goal``, in order. Nothing more, once all of it has.

    What must leave its shard goes to the one that holds least of its model, largest first. Balancing takes slices
    from shards above the mean for the one that holds least, until all are within 5 % of the mean or no single slice
    would help. So a drain moves the bytes of the drained shards, and a new shard gets its share and no more.
    """
    if goal.model:
        pieces = [s for s in maps[goal.model].slices if s.variable == goal.variable and s.shard != goal.to]
        return [Move(goal.model, piece, goal.to, _nbytes(maps[goal.model], piece)) for piece in pieces]
    everything: Counter[int] = Counter()
    for shard_map in maps.values():
        everything.update(_loads(shard_map))
    moves: list[Move] = []
    for name in sorted(maps):
        moves += _Planner(maps[name], goal.shards, everything).moves(goal.balance)
    return moves


class _Planner:
    """One model's moves. ``everything`` holds the bytes of all models by shard, and is brought forward."""

    def __init__(self, shard_map: ShardMap, shards: Sequence[int], everything: Counter[int]) -> None:
        self._map = shard_map
        self._shards = shards
        self._everything = everything
        self._loads = _loads(shard_map)
        self._held: defaultdict[int, list[Slice]] = defaultdict(list)
        for piece in shard_map.slices:
            self._held[piece.shard].append(piece)
        #: Slices that move, as they lie now, and where they are to go.
        self._to: dict[Slice, int] = {}

    def moves(self, balance: bool) -> list[Move]:
        homeless = [piece for piece in self._map.slices if piece.shard not in self._shards]
        for piece in sorted(homeless, key=lambda s: (-_nbytes(self._map, s), s.variable, s.row_begin)):
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
        """The next slice that makes loads more even, from where, to where; None when they are even enough.

        Each takes less than the difference from the larger, so the sum of squares falls and this ends.
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
                # The largest that makes nobody cross the mean, else the smallest; the first in the map among equals.
                within = [each for each in fitting if each[0] <= room]
                size = max(each[0] for each in within) if within else min(each[0] for each in fitting)
                return next(piece for each, piece in fitting if each == size), giver, least
        return None

    def _move(self, piece: Slice, giver: int, to: int) -> None:
        self._to[piece] = to
        size = _nbytes(self._map, piece)
        self._held[giver].remove(piece)
        self._held[to].append(piece)
        for loads in (self._loads, self._everything):
            loads[giver] -= size
            loads[to] += size


def batches(maps: Mapping[str, ShardMap], moves: Collection[Move], batch_bytes: int) -> Iterator[Batch]:
    """``moves`` in order, as many at a time as ``batch_bytes`` hold, one at least; each builds on those before it."""
    current = dict(maps)
    waiting: list[Move] = []
    for move in moves:
        if waiting and sum(each.nbytes for each in waiting) + move.nbytes > batch_bytes:
            yield _batch(current, waiting)
            waiting = []
        waiting.append(move)
    if waiting:
        yield _batch(current, waiting)


def _batch(current: dict[str, ShardMap], moves: Sequence[Move]) -> Batch:
    """The batch of ``moves``; brings ``current`` forward."""
    names = sorted({move.model for move in moves})
    for name in names:
        current[name] = _moved(current[name], [move for move in moves if move.model == name])
    return Batch(
        tuple(current[name] for name in names),
        frozenset(move.to for move in moves),
        sum(move.nbytes for move in moves),
    )


def _moved(shard_map: ShardMap, moves: Sequence[Move]) -> ShardMap:
    to = {move.piece: move.to for move in moves}
    slices = [replace(piece, shard=to.get(piece, piece.shard)) for piece in shard_map.slices]
    return replace(
        shard_map,
        epoch=shard_map.epoch + 1,
        shards=max(shard_map.shards, *(number + 1 for number in to.values())),
        slices=in_arena_order(shard_map.spec, slices),
    )


def _loads(shard_map: ShardMap) -> Counter[int]:
    loads: Counter[int] = Counter()
    for piece in shard_map.slices:
        loads[piece.shard] += _nbytes(shard_map, piece)
    return loads


def _nbytes(shard_map: ShardMap, piece: Slice) -> int:
    return (piece.row_end - piece.row_begin) * shard_map.spec.variables[piece.variable].row_bytes
