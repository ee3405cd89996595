"""The same stream, model and flags in every system, one after the other; each leaves its scores in a folder.

``examples/streaming_model.py`` is what is run: with workers and a shard, the same once more with a shard and a worker
killed in the middle of a window, and in one process of plain torch; its model stands once more in
``benchmarks/peers/tensorflow_stream.py``.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import click
import numpy as np
from clicks.auc import auc
from streaming import results
from streaming.events import Stream

from benchmarks import other_python, report
from benchmarks.cluster import running_cluster
from benchmarks.processes import ChildFailed, end_with_parent
from benchmarks.streaming import EXAMPLES

RESULTS = Path(__file__).parents[1] / "results" / "streaming.json"

OURS, KILLED, ONE, TENSORFLOW = "torch-ps", "torch-ps, killed", "one process", "TensorFlow"

ASKED_AUC, ASKED_KILLED, ASKED_ONE, ASKED_TENSORFLOW = 0.002, 0.001, 0.8, 2.0

_SAY_SECONDS = 600.0
"""A worker that says nothing for so long has failed."""

Window = dict[str, float]


@dataclass(frozen=True, slots=True)
class Settings:
    """Flags of the example that are alike in all systems."""

    windows: int = 20
    events: int = 500_000
    items: int = 2000
    batch: int = 1024
    dim: int = 16
    #: With 0.005 the AUC of two runs of one system differs by 0.0015.
    lr: float = 0.002
    row_lr: float = 0.02
    initial: float = 1e-8
    rank_every: int = 4
    #: More than 1 takes some 0.001 of the AUC: of each id the first gradients are dropped.
    admit_after: int = 1
    seed: int = 0

    def flags(self, out: Path) -> list[str]:
        """For the example."""
        given = {**asdict(self), "out": out, "expect_auc": 0}
        return [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]


QUICK = Settings(windows=5, events=100_000, items=400, rank_every=2)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of a system left."""

    windows: list[Window]
    #: Batches that were not trained, and that were trained twice; of the example alone.
    missed: int = 0
    twice: int = 0
    #: Batches that came again to another worker, which found them trained.
    again: int = 0

    @classmethod
    def of(cls, folder: Path) -> Outcome:
        """What the example wrote."""
        found = json.loads((folder / "results.json").read_text())
        again = sum(int(window["again"]) for window in found["windows"])
        return cls(found["windows"], found["not trained"], found["trained twice"], again)

    @property
    def rate(self) -> float:
        """Events a second of training, without the first window, in which code is loaded and compiled."""
        timed = self.windows[1:] or self.windows
        return sum(each["events"] for each in timed) / sum(each["seconds"] for each in timed)

    def distance(self, other: Outcome, windows: slice = slice(None)) -> float:
        """The largest difference of the AUC of a window, of all or of these."""
        pairs = zip(self.windows[windows], other.windows[windows], strict=True)
        return max(abs(one["auc"] - two["auc"]) for one, two in pairs)


class Script:
    """The example in a process of its own; what it says is read as it comes. Ended by its pid with the context."""

    def __init__(self, flags: list[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / "streaming_model.py"), *flags],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            preexec_fn=end_with_parent,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._process.stdout or nullcontext(()) as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def until(self, window: int) -> None:
        """Wait until it is in the middle of ``window``. Raises ChildFailed."""
        while (line := self._next()) is not None:
            if line.startswith(f"window {window}: "):
                return
        raise ChildFailed(f"a worker ended with code {self._process.wait()} before window {window}")

    def finish(self) -> None:
        """Wait for its end. Raises ChildFailed unless that is good."""
        while self._next() is not None:
            pass
        if code := self._process.wait():
            raise ChildFailed(f"the example ended with code {code}")

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def _next(self) -> str | None:
        try:
            return self._lines.get(timeout=_SAY_SECONDS)
        except queue.Empty:
            raise ChildFailed(f"the example said nothing for {_SAY_SECONDS:g} s") from None


def one_process(settings: Settings, out: Path, threads: int) -> Outcome:
    """Plain torch."""
    with _script([*settings.flags(out), "--local"], {"OMP_NUM_THREADS": str(threads)}) as script:
        script.finish()
    return Outcome.of(out)


def ours(
    settings: Settings, out: Path, workers: int = 2, shards: int = 1, *, kill_in: int = -1, options: Sequence[str] = ()
) -> Outcome:
    """A job of its own. ``kill_in``: in this window a shard, which logs its updates, and a worker are killed.

    ``options``: of the coordinator.
    """
    with ExitStack() as stack:
        kept: tuple[str, ...] = ()
        if kill_in >= 0:
            kept = ("--data-dir", stack.enter_context(tempfile.TemporaryDirectory(prefix="ps-stream-")))
        # Workers may come and go: one that is killed is replaced before it is known to be dead.
        cluster = stack.enter_context(running_cluster(shards, 0, options=kept, coordinator_options=options))
        environment = {"PS_COORDINATOR": cluster.address, "OMP_NUM_THREADS": "1"}

        def worker() -> Script:
            return stack.enter_context(_script(settings.flags(out), environment))

        scripts = [worker() for _ in range(workers)]
        if kill_in >= 0:
            scripts[-1].until(kill_in)
            cluster.kill_shard(0)
            cluster.start_shard(0)
            scripts[-1].until(kill_in)
            scripts[-1].kill()
            scripts[-1] = worker()
        for script in scripts:
            script.finish()
    return Outcome.of(out)


def tensorflow(settings: Settings, out: Path, python: Path, workers: int = 2) -> Outcome:
    """A parameter server and workers of TensorFlow; their scores are judged as those of the example."""
    given = {**asdict(settings), "out": str(out), "workers": workers}
    program = other_python.PROGRAMS / "tensorflow_stream.py"
    done = subprocess.run(
        [python, program, json.dumps(given)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES)},
        preexec_fn=end_with_parent,
        check=False,
    )
    if done.returncode:
        raise ChildFailed(f"{program.name} ended with code {done.returncode}; its last words are above")
    return Outcome([each | judged(settings, out, each["window"]) for each in map(json.loads, done.stdout.splitlines())])


def judged(settings: Settings, out: Path, window: int) -> Window:
    """The AUC of the scores of the window after ``window``, and the best reachable."""
    updates = -(-settings.events // settings.batch)
    places = range((window + 1) * updates, (window + 2) * updates, settings.rank_every)
    both = np.concatenate([np.load(out / "scores" / f"{window + 1}-{place}.npy") for place in places], axis=1)
    stream = Stream(settings.seed, settings.events, items=settings.items)
    parts = [stream.draw(window + 1, (place - places[0]) * settings.batch, settings.batch).truth for place in places]
    return {"auc": auc(both[0], both[1]), "best": auc(both[0], np.concatenate(parts))}


def tables(found: Mapping[str, Outcome]) -> list[str]:
    """Lines of Markdown: the AUC of each window, and the rates."""
    best = [window["best"] for window in next(iter(found.values())).windows]
    lines = ["| ranked | best reachable |" + "".join(f" {name} |" for name in found), "|--:" * (2 + len(found)) + "|"]
    for number, reachable in enumerate(best):
        cells = [f"{outcome.windows[number]['auc']:.4f}" for outcome in found.values()]
        lines.append(f"| {number + 1} | {reachable:.4f} | " + " | ".join(cells) + " |")
    lines += ["", "| | events/s | batches not trained, twice | came again |", "|---|--:|--:|--:|"]
    lines += [
        f"| {name} | {outcome.rate:,.0f} | {outcome.missed}, {outcome.twice} | {outcome.again} |"
        for name, outcome in found.items()
    ]
    return lines


def asked(found: Mapping[str, Outcome]) -> list[str]:
    """A line for each figure that is asked for, where both its terms were measured."""
    lines = []
    own, one, killed = found.get(OURS), _fastest(found), found.get(KILLED)
    if own and one:
        lines.append(_line("AUC of a window, away from one process", own.distance(one), ASKED_AUC, most=True))
        lines.append(_line("events/s, by one process", own.rate / one.rate, ASKED_ONE))
    if own and killed:
        first = _killed_in(len(own.windows))
        away, noise = killed.distance(own, slice(first, None)), killed.distance(own, slice(first))
        lines.append(_line("AUC of a window from the kills on, away from without", away, ASKED_KILLED, most=True))
        lines.append(f"- the same in the windows before the kills, by chance: {noise:.4g}")
        lines.append(_line("batches lost or trained twice with kills", killed.missed + killed.twice, 0, most=True))
    if own and TENSORFLOW in found:
        lines.append(_line("events/s, by TensorFlow", own.rate / found[TENSORFLOW].rate, ASKED_TENSORFLOW))
    return lines


def _killed_in(windows: int) -> int:
    return windows // 2


def _fastest(found: Mapping[str, Outcome]) -> Outcome | None:
    return max(
        (outcome for name, outcome in found.items() if name.startswith(ONE)), key=lambda each: each.rate, default=None
    )


def _line(what: str, value: float, bound: float, *, most: bool = False) -> str:
    reached = value <= bound if most else value >= bound
    sign = "≤" if most else "≥"
    return f"- {what}: {value:.4g}, asked {sign} {bound:g}: {'reached' if reached else 'not reached'}"


def draw(found: Mapping[str, Outcome], path: Path) -> None:
    """Write a PNG: AUC by window."""
    results.draw({name: outcome.windows for name, outcome in found.items()}, path)


@contextmanager
def _script(flags: list[str], environment: Mapping[str, str]) -> Iterator[Script]:
    script = Script(flags, environment)
    try:
        yield script
    finally:
        script.kill()


@click.command()
@click.option("--quick", is_flag=True, help="5 windows of 100,000 events, in place of 20 of 500,000.")
@click.option("--windows", type=click.IntRange(2), help="Windows to train on.")
@click.option("--events", type=click.IntRange(1), help="Events of a window.")
@click.option("--lr", type=float, help=f"Of the dense parameters.  [default: {Settings().lr:g}]")
@click.option("--staleness", type=click.IntRange(0), help="Train with ssp of this bound.  [default: async]")
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True)
@click.option("--shards", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--threads", type=click.IntRange(1), multiple=True, help="Of one process; may be repeated. None: 1, and all cores."
)
@click.option(
    "--only", type=click.Choice([OURS, KILLED, ONE, TENSORFLOW]), multiple=True, help="A system; may be repeated."
)
@click.option(
    "--tensorflow",
    "python",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="An interpreter that has TensorFlow; without it that is not measured.",
)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS, help="JSON of everything.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write a PNG: AUC by window.")
def main(
    quick: bool,
    windows: int | None,
    events: int | None,
    lr: float | None,
    staleness: int | None,
    workers: int,
    shards: int,
    threads: tuple[int, ...],
    only: tuple[str, ...],
    python: Path | None,
    output: Path,
    plot: Path | None,
) -> None:
    """Train and rank the stream in each system, one after the other; print tables in Markdown, keep them as JSON."""
    settings = QUICK if quick else Settings()
    given = {"windows": windows, "events": events, "lr": lr}
    settings = replace(settings, **{name: value for name, value in given.items() if value})
    options = () if staleness is None else ("--mode", "ssp", "--staleness", str(staleness))
    train = partial(ours, settings, workers=workers, shards=shards, options=options)
    systems: list[tuple[str, str, Callable[[Path], Outcome]]] = [
        (ONE, f"{ONE}, {count} thread{'s' * (count > 1)}", partial(one_process, settings, threads=count))
        for count in sorted({*threads} or {1, os.cpu_count() or 1})
    ]
    systems.append((OURS, OURS, train))
    systems.append((KILLED, KILLED, partial(train, kill_in=_killed_in(settings.windows))))
    if python:
        systems.append((TENSORFLOW, TENSORFLOW, partial(tensorflow, settings, python=python, workers=workers)))
    found: dict[str, Outcome] = {}
    for system, name, run in systems:
        if only and system not in only:
            continue
        click.echo(f"{name}: {settings.windows * settings.events:,} events", err=True)
        with tempfile.TemporaryDirectory(prefix="ps-stream-") as out:
            found[name] = run(Path(out))
    if not found:
        raise click.UsageError("nothing is left to measure: TensorFlow needs --tensorflow")
    click.echo(f"{', '.join(report.machine().values())}; load {os.getloadavg()[0]:.1f} at the end\n")
    click.echo("\n".join([*tables(found), "", *asked(found)]))
    output.parent.mkdir(parents=True, exist_ok=True)
    kept = {name: asdict(outcome) for name, outcome in found.items()}
    everything = {"machine": report.machine(), "settings": asdict(settings), "staleness": staleness, "systems": kept}
    output.write_text(json.dumps(everything, indent=1) + "\n")
    if plot:
        draw(found, plot)
