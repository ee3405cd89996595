"""What a run leaves in its folder, and the table that is made of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from clicks.auc import auc
from torch import Tensor, nn

from .batch import Batch
from .events import Stream

_SAY_EVERY = 16


class Results:
    """The files of one worker in a folder that all workers share. Used by the training thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._scores = folder / "scores"
        self._scores.mkdir(parents=True, exist_ok=True)
        self._counts = folder / f"worker-{os.getpid()}.jsonl"
        self._steps = self._again = 0

    def progress(self, window: int, events: int) -> None:
        """Say now and then how far this worker is."""
        self._steps += 1
        if self._steps % _SAY_EVERY == 0:
            print(f"window {window}: {events:,} events", flush=True)

    def again(self, window: int) -> None:
        """A batch came that was trained before."""
        self._again += 1
        print(f"window {window}: a batch was trained already, by a worker that did not report it", flush=True)

    def trained(self, window: int, events: int, seconds: float) -> None:
        """Keep that this worker has trained its part of a window."""
        line = {"window": window, "events": events, "seconds": seconds, "again": self._again}
        with self._counts.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._again = 0

    def keep(self, window: int, batch: Batch, scores: Tensor) -> None:
        """Write the scores of a batch, in one piece or not at all."""
        path = self._scores / f"{window}-{int(batch.number)}.npy"
        part = path.with_suffix(f".{os.getpid()}")
        with part.open("wb") as file:
            np.save(file, np.stack([batch.labels.cpu().numpy(), scores.cpu().numpy()]))
        part.replace(path)

    def show(self, stream: Stream, args: Any, marks: nn.Module) -> int:
        """Print what all workers did, keep it as ``results.json``, and return the exit code."""
        windows = [self._window(stream, number, args) for number in range(args.windows)]
        with torch.no_grad():
            times = marks(torch.arange(args.windows * args.updates)).flatten()
        found = {
            "windows": windows,
            "batches": args.windows * args.updates,
            "not trained": int((times < 0.5).sum()),
            "trained twice": int((times > 1.5).sum()),
        }
        (self._folder / "results.json").write_text(json.dumps(found, indent=1) + "\n")
        print("\n".join(table(windows)))
        print(f"{found['batches']:,} batches, {found['not trained']} not trained, {found['trained twice']} twice")
        if args.plot:
            draw({"this run": windows}, args.plot)
        reached = windows[-1]["auc"]
        print(f"AUC of the last window {reached:.4f} (expected at least {args.expect_auc:.4f})")
        exact = not found["not trained"] and not found["trained twice"]
        return int(not (exact and reached >= args.expect_auc))

    def _window(self, stream: Stream, number: int, args: Any) -> dict[str, float]:
        """Training of window ``number``, and the ranking of the next one."""
        every = [
            json.loads(line) for file in self._folder.glob("worker-*.jsonl") for line in file.read_text().splitlines()
        ]
        lines = [line for line in every if line["window"] == number]
        labels, scores, best = [], [], []
        for place in range(0, args.updates, args.rank_every):
            number_of_batch = (number + 1) * args.updates + place
            own = np.load(self._scores / f"{number + 1}-{number_of_batch}.npy")
            labels.append(own[0])
            scores.append(own[1])
            best.append(stream.draw(number + 1, place * args.batch, args.batch).truth)
        return {
            "window": number,
            "events": stream.events,
            "seconds": max(line["seconds"] for line in lines),
            "again": sum(line["again"] for line in lines),
            "auc": auc(np.concatenate(labels), np.concatenate(scores)),
            "best": auc(np.concatenate(labels), np.concatenate(best)),
        }


def table(windows: list[dict[str, float]]) -> list[str]:
    """Lines of Markdown."""
    head = [
        "| trained | ranked | AUC | best reachable | events/s | batches not trained again |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    return head + [
        f"| {each['window']} | {each['window'] + 1} | {each['auc']:.4f} | {each['best']:.4f} |"
        f" {each['events'] / each['seconds']:,.0f} | {each['again']:.0f} |"
        for each in windows
    ]


def draw(runs: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Write a PNG: AUC by window of each run, and the best reachable."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, windows in runs.items():
        axis.plot([each["window"] + 1 for each in windows], [each["auc"] for each in windows], marker="o", label=name)
    first = next(iter(runs.values()))
    axis.plot([each["window"] + 1 for each in first], [each["best"] for each in first], "--", color="0.6", label="best")
    axis.set(xlabel="window", ylabel="AUC", title="ranked with what was learnt until the window before")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
