"""The figures of ``docs/learning.md``: each study makes its trainings and returns its table, in Markdown.

Unless a study is about stability, the learning rate of each training rises over the first twentieth of the pushes and
then falls to 0 along a line. All settings of a task make as many pushes: equal samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from benchmarks.learning.grid import Row
from benchmarks.learning.laboratory import Setting
from benchmarks.learning.tasks import TASKS
from ps_protocol.model.spec import Consistency, Mode
from ps_worker.model.momentum import slowdown

Training = tuple[str, Setting, str]
"""Task, setting and speeds."""

Train = Callable[[Sequence[Training]], Sequence[Row]]
"""Makes trainings with each seed; rows in the order of the settings."""

SYNC, ASYNC, SSP = Consistency(Mode.SYNC), Consistency(Mode.ASYNC), Consistency(Mode.SSP, 4)

_PUSHES = {"quadratic": 2000, "characters": 1200}


@dataclass(frozen=True)
class Optimizer:
    """One that a user brings, and what takes its place in async and ssp."""

    name: str
    arguments: Mapping[str, Any]
    #: Learning rates around the best of sync.
    rates: Sequence[float]
    #: By the number of workers: what sync's learning rate is multiplied by in async and ssp.
    factor: Callable[[int], float]


OPTIMIZERS: Mapping[str, Optimizer] = MappingProxyType(
    {
        "Adam": Optimizer("Adam", {}, (0.03, 0.01), lambda workers: 1 / workers),
        "Adagrad": Optimizer("Adagrad", {}, (0.1, 0.03), lambda workers: workers**-0.5),
        "SGD": Optimizer("SGD", {}, (0.8, 0.4), lambda workers: 1 / workers),
        # Without momentum. Half of what momentum makes of a step in the end, 1 / (1 - momentum) times as much.
        "SGD, momentum 0.9": Optimizer("SGD", {"momentum": 0.9}, (0.1, 0.05), lambda workers: 5 / workers),
    }
)


def in_async(optimizer: str, rate: float, workers: int) -> tuple[str, dict[str, Any]]:
    """What is recommended in async and ssp where ``rate`` is the best of ``optimizer`` in sync: class and arguments."""
    of = OPTIMIZERS[optimizer]
    return of.name, {"lr": rate * of.factor(workers)}


WORKERS = (4, 8, 16)

CASES = (
    *((task, "Adam") for task in ("digits", "clicks", "characters")),
    *(("digits-by-label", "Adam"), ("digits", "Adagrad"), ("clicks", "Adagrad")),
    *(("digits", "SGD"), ("digits", "SGD, momentum 0.9")),
)
"""Tasks and optimizers that ``recommended`` compares."""


def recommended(train: Train) -> str:
    """Sync's best rate of a grid, and what is recommended in async and ssp, at equal samples."""
    best = _best_of_sync(train, WORKERS)
    kinds = [(ASYNC, "exponential"), (SSP, "exponential"), (ASYNC, "equal")]
    delayed = [train([_delayed(case, sync, *kind) for case, sync in best.items()]) for kind in kinds]
    lines = []
    for (case, sync), *rows in zip(best.items(), *delayed, strict=True):
        rates = [f"{row.setting.options['lr']:.3g}" for row in (sync, rows[0])]
        lines.append([*case, *rates, _score(sync), *(_beside(row, sync) for row in rows)])
    return _markdown(
        [
            *("task", "optimizer", "workers", "lr sync", "lr async"),
            *("sync", "async, exponential", "ssp(4), exponential", "async, equal speeds"),
        ],
        lines,
    )


def diverged(train: Train) -> str:
    """How many trainings with recommended settings diverge. The rates of 4 and 16 workers also serve 2 and 32."""
    best = _best_of_sync(train, WORKERS)
    lines = []
    for workers, nearest in {2: 4, 4: 4, 8: 8, 16: 16, 32: 16}.items():
        found = [((task, optimizer), row) for (task, optimizer, count), row in best.items() if count == nearest]
        rows = train([_delayed((*case, workers), sync, ASYNC, "exponential") for case, sync in found])
        lines.append([workers, sum(row.diverged for row in rows), sum(len(row.outcomes) for row in rows)])
    return _markdown(["workers", "diverged", "trainings"], lines)


def time(train: Train) -> str:
    """Virtual seconds until the mean loss that four workers reach in sync at the end.

    Async makes 1.4 times as many pushes; with one worker four times slower these still take 0.43 of sync's time, and
    with exponential times 0.66.
    """
    lines = []
    for (task, optimizer, workers), sync in _best_of_sync(train, (4,)).items():
        if optimizer not in ("Adam", "Adagrad"):
            continue
        pushes = sync.setting.pushes * 7 // 5
        for speeds in ("slow:4", "exponential"):
            delayed = _delayed((task, optimizer, workers), sync, ASYNC, speeds)
            waits, row = train([(task, sync.setting, speeds), _with(delayed, pushes=pushes)])
            whole = sum(outcome.seconds for outcome in waits.outcomes) / len(waits.outcomes)
            found = row.seconds_to(sync.mean)
            part = "not reached" if found is None else f"{found / whole:.2f}"
            lines.append([task, optimizer, speeds, _loss(sync), f"{whole:.0f}", _loss(row), part])
    return _markdown(
        ["task", "optimizer", "speeds", "sync's loss", "sync, s", "async's at the end", "async / sync"], lines
    )


_RULES = ("threshold", "concurrency", "inverse", "gap", "compensation", "share")

COMPARED: Sequence[tuple[str, str, Sequence[float], Sequence[str]]] = (
    ("digits", "SGD", (0.2, 0.1, 0.05), _RULES),
    ("digits-by-label", "SGD", (0.2, 0.1, 0.05), _RULES),
    ("clicks", "SGD", (1.6, 0.8, 0.4), ("concurrency", "inverse", "gap", "compensation")),
    ("digits", "SGD, momentum 0.9", (0.02, 0.01, 0.005), ("dana",)),
    ("digits-by-label", "SGD, momentum 0.9", (0.02, 0.01, 0.005), ("dana",)),
    ("digits-by-label", "Adam", (0.006, 0.003), ("concurrency", "gap", "compensation")),
)
"""Task, optimizer, learning rates and the rules that are compared with the plain one."""

SHIFT: Mapping[str, Sequence[float]] = MappingProxyType({"plain": (1.0, 1.4), "inverse": (1.0, 2.0), "gap": (1.0, 2.0)})
"""What these rates are multiplied by: a finer grid for the plain rule, larger steps where a rule makes them smaller."""


def rules(train: Train) -> str:
    """The best of each rule over a grid of rates beside the best of the plain rule, with 8 exponential workers."""
    lines = []
    for task, optimizer, rates, names in COMPARED:
        grids = {
            rule: [
                _with(_plain(task, optimizer, rate, ASYNC, 8, "exponential"), rule=rule)
                for rate in sorted({rate * shift for rate in rates for shift in SHIFT.get(rule, (1.0,))})
            ]
            for rule in ("plain", *names)
        }
        rows = iter(train([each for grid in grids.values() for each in grid]))
        found = {rule: _best([next(rows) for _ in grid]) for rule, grid in grids.items()}
        for rule, row in found.items():
            rate = "–" if row is None else f"{row.setting.options['lr']:g}"
            lines.append([task, optimizer, rule, rate, _loss(row), verdict(row, found["plain"])])
    return _markdown(["task", "optimizer", "rule", "best lr", "loss", "beside plain"], lines)


def verdict(row: Row | None, base: Row | None) -> str:
    """Whether ``row`` beats ``base`` by more than the larger of the two spreads."""
    if row is base or base is None:
        return ""
    if row is None:
        return "lost"
    gain, spread = base.mean - row.mean, max(base.spread, row.spread)
    word = "wins" if gain > spread else "lost" if gain < -spread else "alike"
    return f"{word}: {100 * gain / base.mean:+.1f} %"


STABLE: Mapping[str, tuple[str, Mapping[str, Any], float]] = MappingProxyType(
    {
        "SGD": ("SGD", {}, 0.8),
        "SGD, momentum 0.9": ("SGD", {"momentum": 0.9}, 0.2),
        "SGD, Nesterov 0.9": ("SGD", {"momentum": 0.9, "nesterov": True}, 0.2),
        "Adagrad": ("Adagrad", {}, 0.2),
        "RMSprop": ("RMSprop", {}, 0.02),
        "Adam": ("Adam", {}, 0.04),
        "AdamW": ("AdamW", {}, 0.04),
        "Muon": ("Muon", {}, 0.2),
    }
)
"""Class, arguments and a guess of the largest stable rate of one process."""


def stable(train: Train) -> str:
    """The largest rate at which no seed diverges, by bisection, of one process and beside it of more workers."""
    counts = (1, 4, 16)
    #: The logarithm to base 2 of a rate that is stable, and of one that is not.
    bounds = {
        (name, workers): [math.log2(guess) - 9.0, math.log2(guess) + 3.0]
        for name, (_, _, guess) in STABLE.items()
        for workers in counts
    }
    for _ in range(6):
        middles = {case: sum(ends) / 2 for case, ends in bounds.items()}
        rows = train([_constant(name, 2**middle, workers) for (name, workers), middle in middles.items()])
        for (case, middle), row in zip(middles.items(), rows, strict=True):
            learned = all(outcome.measure < 0.5 * outcome.curve[0][2] for outcome in row.outcomes)
            bounds[case][0 if learned else 1] = middle
    lines = []
    for name, (_, options, _) in STABLE.items():
        largest = [2 ** (sum(bounds[name, workers]) / 2) for workers in counts]
        of_theory = []
        if name.startswith("SGD"):
            of = {"momentum": options.get("momentum", 0.0), "nesterov": options.get("nesterov", False)}
            of_theory = [f"1/{slowdown(workers - 1, **of):.0f}" for workers in counts[1:]]
        parts = [f"1/{largest[0] / each:.0f}" for each in largest[1:]]
        lines.append([name, f"{largest[0]:.2g}", *parts, *(of_theory or ["", ""])])
    return _markdown(["optimizer", "1 process", "4 workers", "16 workers", "theory, 4", "theory, 16"], lines)


def shapes(train: Train) -> str:
    """What papers report, in shape."""
    parts = (_inverse, _one_slow, _by_share, _momentum_by_worker, _muon)
    return "\n\n".join(f"{str(part.__doc__).splitlines()[0]}\n\n{part(train)}" for part in parts)


def _inverse(train: Train) -> str:
    """Zhang et al. 2016: 1/staleness makes the learning rate of one process fit for more workers."""
    settings = [
        _with(_plain("digits", "SGD", 0.2, ASYNC, workers, "equal"), rule=rule)
        for workers in (1, 8, 32)
        for rule in ("plain", "inverse")
    ]
    return _by_rule(train, settings)


def _one_slow(train: Train) -> str:
    """Ringmaster ASGD 2025: a noisy quadratic, one of eight workers 100 times slower: seconds to a value of 0.05."""
    rules = ("plain", "threshold", "concurrency", "inverse")
    rates = (0.8, 0.4, 0.2, 0.1, 0.05)
    settings = [
        _with(_plain("quadratic", "SGD", rate, ASYNC, 8, "slow:100"), rule=rule, warmup=0.0, decay=False, measures=200)
        for rule in rules
        for rate in rates
    ]
    rows, lines = iter(train(settings)), []
    for rule in rules:
        found = {rate: row.seconds_to(0.05) for rate in rates if not (row := next(rows)).diverged}
        reached = {seconds: rate for rate, seconds in found.items() if seconds is not None}
        fastest = [f"{min(reached):.0f}", f"{reached[min(reached)]:g}"] if reached else ["not reached", "–"]
        lines.append([rule, *fastest, f"{max(found):g}" if found else "none"])
    return _markdown(["rule", "seconds", "best lr", "largest lr that is stable"], lines)


def _by_share(train: Train) -> str:
    """Rescaled ASGD 2026: each worker has labels of its own, speeds 1, 1, 0.25, 0.25."""
    settings = [
        _with(_plain("digits-by-label", "SGD", rate, ASYNC, 4, "1,1,0.25,0.25"), rule=rule)
        for rule in ("plain", "share")
        for rate in (0.2, 0.1, 0.05)
    ]
    return _by_rule(train, settings)


def _momentum_by_worker(train: Train) -> str:
    """DANA 2019: momentum 0.9 for each worker with look-ahead, beside one momentum on the shard and none."""
    settings = [
        _with(_plain("digits", optimizer, rate, ASYNC, workers, "equal"), rule=rule)
        for workers in (8, 32)
        for optimizer, rule, rates in (
            ("SGD, momentum 0.9", "plain", (0.01, 0.005)),
            ("SGD, momentum 0.9", "dana", (0.01, 0.005)),
            ("SGD", "plain", (0.1, 0.05)),
        )
        for rate in rates
    ]
    return _by_rule(train, settings)


def _muon(train: Train) -> str:
    """2606.30634: what a delay costs Muon and AdamW, on the matrices of a transformer."""
    settings = [
        (
            "characters-matrices",
            Setting(name, {"lr": rate}, ASYNC, workers, 400, 4, warmup=0.05, decay=True),
            "equal",
        )
        for workers in (1, 8)
        for name, rates in (("AdamW", (0.01, 0.005)), ("Muon", (0.04, 0.02)))
        for rate in rates
    ]
    return _by_rule(train, settings)


STUDIES: Mapping[str, Callable[[Train], str]] = MappingProxyType(
    {each.__name__: each for each in (recommended, diverged, time, rules, stable, shapes)}
)
"""By the name of their command."""


def _plain(task: str, optimizer: str, rate: float, mode: Consistency, workers: int, speeds: str) -> Training:
    of = OPTIMIZERS[optimizer]
    options = {"lr": rate, **of.arguments}
    measures = 20 if workers == 4 else 4  # ``time`` looks at four workers
    setting = Setting(of.name, options, mode, workers, _PUSHES.get(task, 800), measures, warmup=0.05, decay=True)
    return task, setting, speeds


def _delayed(case: tuple[str, str, int], sync: Row, mode: Consistency, speeds: str) -> Training:
    task, optimizer, workers = case
    _, options = in_async(optimizer, sync.setting.options["lr"], workers)
    return task, replace(sync.setting, options=options, consistency=mode, workers=workers), speeds


def _with(training: Training, **changes: Any) -> Training:
    task, setting, speeds = training
    return task, replace(setting, **changes), speeds


def _constant(name: str, rate: float, workers: int) -> Training:
    """A training for stability, with pushes enough for a rate that is stable with so many workers."""
    optimizer, options, _ = STABLE[name]
    task = "digits-matrices" if name == "Muon" else "digits"
    return task, Setting(optimizer, {"lr": rate, **options}, ASYNC, workers, 150 * max(4, workers), 4), "equal"


def _best_of_sync(train: Train, counts: Iterable[int]) -> dict[tuple[str, str, int], Row]:
    """By task, optimizer and number of workers: the row of the best rate."""
    grids = {
        (task, optimizer, workers): [
            _plain(task, optimizer, rate, SYNC, workers, "exponential") for rate in OPTIMIZERS[optimizer].rates
        ]
        for task, optimizer in CASES
        for workers in counts
        if task != "digits-by-label" or workers <= 10  # labels
    }
    rows = iter(train([each for grid in grids.values() for each in grid]))
    found = {case: _best([next(rows) for _ in grid]) for case, grid in grids.items()}
    return {case: row for case, row in found.items() if row is not None}


def _best(rows: Sequence[Row]) -> Row | None:
    """By the mean loss; None where each diverges."""
    return min((row for row in rows if not row.diverged), key=lambda row: row.mean, default=None)


def _by_rule(train: Train, settings: Sequence[Training]) -> str:
    lines = []
    for row in train(settings):
        setting = row.setting
        words = [setting.optimizer, *(f"{name} {value:g}" for name, value in setting.options.items() if name != "lr")]
        lines.append([setting.workers, " ".join(words), setting.rule, f"{setting.options['lr']:g}", _loss(row)])
    return _markdown(["workers", "optimizer", "rule", "lr", "loss"], lines)


def _loss(row: Row | None) -> str:
    if row is None:
        return "each diverges"
    return (
        f"{row.mean:.4f} ± {row.spread:.4f}" if not row.diverged else f"{row.diverged} of {len(row.outcomes)} diverge"
    )


def _score(row: Row) -> str:
    if row.diverged:
        return f"{row.diverged} of {len(row.outcomes)} diverge"
    return f"{row.score:.4g} ± {row.score_spread:.2g}"


def _beside(row: Row, sync: Row) -> str:
    """The score, and how much better it is than ``sync``'s in percent."""
    if row.diverged:
        return _score(row)
    better = 100 * (row.score / sync.score - 1) * (1 if TASKS[row.task]().larger_is_better else -1)
    return f"{_score(row)} ({better:+.2f} %)"


def _markdown(head: Sequence[object], lines: Sequence[Sequence[object]]) -> str:
    table = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in table)
