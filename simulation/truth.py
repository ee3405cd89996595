"""What the judge knows of one shard number, over all its processes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ps_protocol.model.spec import Consistency
from ps_server.consistency import Position, PushInfo, Verdict
from ps_server.consistency.events import START
from simulation.loads import Load, Loads, RowLoad

Name = tuple[int, int, int]
"""A push: rank, incarnation, sequence."""

RowValues = Mapping[int, float]
"""By id: the number that all elements of a row have."""


State = tuple[float, float]
"""Value and momentum."""


def same(value: float, expected: float) -> bool:
    """Whether these are the same values. NaN: there are none to compare."""
    return math.isnan(value) or math.isclose(value, expected, rel_tol=1e-9)


def name_of(push: PushInfo) -> Name:
    """The name of ``push``; of a combined one that of its sender's part."""
    return (push.worker.rank, push.worker.incarnation, push.sequence)


@dataclass(slots=True)
class Clocks:
    """Where participants stand, and how many at each position."""

    of: dict[int, Position] = field(default_factory=dict)
    count: Counter[Position] = field(default_factory=Counter)

    def place(self, rank: int, position: Position) -> None:
        """``rank`` stands at ``position`` now."""
        self.remove(rank)
        self.of[rank] = position
        self.count[position] += 1

    def remove(self, rank: int) -> None:
        """``rank`` takes part no longer."""
        position = self.of.pop(rank, None)
        if position is not None:
            self.count[position] -= 1
            if not self.count[position]:
                del self.count[position]

    def below(self, position: Position) -> int:
        """How many stand below ``position``."""
        return sum(number for stands, number in self.count.items() if stands < position)


@dataclass(slots=True)
class Update:
    """One update as it was logged."""

    pushes: tuple[PushInfo, ...]
    #: Values and momentum once it is applied.
    value: float
    velocity: float
    is_round: bool
    #: What it adds to rows.
    rows: RowValues


@dataclass(slots=True)
class ShardTruth:
    """What the judge knows of one shard number, over all its processes."""

    number: int
    initial: float | None = None
    #: A worker was told that the initial values are there.
    values_acknowledged: bool = False
    #: What was logged and not lost since; version v is at v − 1.
    history: list[Update] = field(default_factory=list)
    #: What the process that was restored last did not know; empty once it has logged an update or answered anybody.
    behind: list[Update] = field(default_factory=list)
    applied: dict[Name, int] = field(default_factory=dict)
    #: The highest version that holds an acknowledged push.
    acknowledged: int = 0
    acknowledged_by: int = 0
    #: The disk of the process that acknowledged the last push, or the initial values.
    acknowledged_on: str = ""
    #: Pushes of which a worker was told that they changed nothing.
    dropped: set[Name] = field(default_factory=set)
    mode: Consistency = field(default_factory=Consistency)
    #: As this life of the shard was told.
    live: dict[int, int] = field(default_factory=dict)
    #: Incarnation of each participant.
    taking_part: dict[int, int] = field(default_factory=dict)
    clocks: Clocks = field(default_factory=Clocks)
    #: No push was accepted, in this life or in what it restored.
    untouched: bool = True
    #: Where workers stand then.
    entry: Position = START
    last_round: Position = START
    #: The last round that any process of the shard has decided.
    furthest_round: Position = START
    #: Highest position each life of a worker was ever accepted or placed at.
    reached: dict[tuple[int, int], Position] = field(default_factory=dict)
    verdicts: dict[Name, Verdict] = field(default_factory=dict)
    #: By what the learning rate of each push is multiplied.
    factors: dict[Name, float] = field(default_factory=dict)
    #: What each push carries.
    sent: dict[Name, float] = field(default_factory=dict)
    #: The gradient that a worker of a host had for a push; None: it skipped the step.
    made: dict[Name, float | None] = field(default_factory=dict)
    #: What each combined push carries, and of how many workers that is the mean.
    combined: dict[Name, tuple[float, int]] = field(default_factory=dict)
    #: What checkpoints put in the place of values and momentum, and of rows.
    loads: Loads[Load] = field(default_factory=Loads)
    row_loads: Loads[RowLoad] = field(default_factory=Loads)
    #: Checkpoints that were put in, by folder.
    checkpoints: set[str] = field(default_factory=set)
    #: The model was released, and the log of the shard says so.
    gone: bool = False

    def begin_at(self, version: int, last_round: Position, highest: Position) -> None:
        """The job begins with a checkpoint of another one: where that stood. What its updates were is not known."""
        self.history = [Update((), math.nan, 0.0, False, {})] * version
        self.last_round = self.furthest_round = last_round
        self.entry = max(last_round, highest)
        for rank in self.clocks.of.copy():
            self.clocks.place(rank, self.entry)

    @property
    def newest(self) -> float:
        """The value after the last update in the log."""
        return self.states(len(self.history))[-1][0]

    def states(self, version: int) -> list[State]:
        """The states that ``version`` has had, in order."""
        first = (self.history[version - 1].value, self.history[version - 1].velocity) if version else None
        return [first or (self.initial or 0.0, 0.0), *((each.value, each.velocity) for each in self.loads.of(version))]

    def had(self, version: int, value: float, *, acknowledged: bool = False) -> int | None:
        """The last of ``states`` with this value; None: there is none. ``acknowledged``: none before that one."""
        first = self.loads.first(version) if acknowledged else 0
        states = self.states(version)
        return next((each for each in range(len(states) - 1, first - 1, -1) if same(value, states[each][0])), None)

    def forget_behind(self, version: int) -> None:
        """What came after ``version`` is lost, or is ``behind``."""
        self.behind = self.history[version:]
        for update in self.behind:
            for each in (each for push in update.pushes for each in push.contributions):
                del self.applied[name_of(each)]
        del self.history[version:]
        self.acknowledged = min(self.acknowledged, version)
        self.loads.forget_behind(version)
        self.row_loads.forget_behind(version)

    def bring_back(self, version: int) -> None:
        """A process restores ``version``. One before it did not know all of that, as a standby that never served."""
        for update in self.behind[: max(0, version - len(self.history))]:
            self.history.append(update)
            for each in (each for push in update.pushes for each in push.contributions):
                self.applied[name_of(each)] = len(self.history)

    def logs(self, update: Update) -> None:
        """An update is in the log."""
        self.history.append(update)
        self.behind = []

    def gradients(self, names: Iterable[Name]) -> list[float]:
        """Of workers of a host, those that they had for these pushes."""
        return [value for name in names if (value := self.made[name]) is not None]

    def carried(self, push: PushInfo) -> tuple[float, int]:
        """The mean of gradients that ``push`` brings, and of how many workers it is."""
        value, workers = self.combined[name_of(push)] if push.others else (self.sent[name_of(push)], 1)
        return 0.0 if math.isnan(value) else value, workers

    @property
    def held(self) -> set[Name]:
        """Pushes of live workers that have been accepted and not been applied."""
        return {
            name
            for name, verdict in self.verdicts.items()
            if verdict is Verdict.HOLD and name not in self.applied and self.live.get(name[0]) == name[1]
        }

    def row(self, number: int, version: int) -> float:
        """The row with id ``number`` after the update that made ``version``."""
        return sum(update.rows.get(number, 0.0) for update in self.history[:version])
