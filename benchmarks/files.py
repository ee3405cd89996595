"""What it costs to read files: rows a second and core beside Arrow alone, and how long the click model waits for rows.

python -m benchmarks.files
python -m benchmarks.files --rows 4000000 --rounds 5
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch

from ps_worker import files

NUMBERS = [f"I{i}" for i in range(1, 14)]
CATEGORIES = [f"C{i}" for i in range(1, 27)]
BATCH = 4096
GROUP_ROWS = 1 << 17

IDS = {
    "label": files.floats("label"),
    "numbers": files.floats(*NUMBERS),
    "ids": files.ids(*CATEGORIES),
}
STRINGS = {**IDS, "ids": files.hashed(*CATEGORIES)}


def click_table(rows: int, seed: int = 0) -> pa.Table:
    """A label, 13 numbers and 26 ids whose columns have 10 to 10 million values, by a power law."""
    draw = np.random.default_rng(seed)
    sizes = np.geomspace(10, 1e7, len(CATEGORIES)).astype(np.int64)
    columns = {"label": draw.integers(0, 2, rows).astype(np.int8)}
    columns |= {name: draw.standard_normal(rows).astype(np.float32) for name in NUMBERS}
    columns |= {name: draw.zipf(1.2, rows) % size for name, size in zip(CATEGORIES, sizes, strict=True)}
    return pa.table(columns)


def written(folder: Path, rows: int) -> dict[str, Path]:
    """The same rows as Parquet with ids, Parquet with strings, and text, plain and compressed."""
    table = click_table(rows)
    paths = {"ids": folder / "ids.parquet", "strings": folder / "strings.parquet", "text": folder / "text.tsv"}
    pq.write_table(table, paths["ids"], row_group_size=GROUP_ROWS)
    strings = table
    for name in CATEGORIES:
        values = [f"{value:08x}" for value in table.column(name).to_pylist()]
        strings = strings.set_column(strings.schema.get_field_index(name), name, pa.array(values))
    pq.write_table(strings, paths["strings"], row_group_size=GROUP_ROWS)
    pyarrow.csv.write_csv(strings, paths["text"], pyarrow.csv.WriteOptions(delimiter="\t"))
    return paths


def arrow_alone(path: Path) -> Callable[[], int]:
    """Decode the file into Arrow arrays, as fast as Arrow does on one core."""
    if path.suffix == ".tsv":
        parse = pyarrow.csv.ParseOptions(delimiter="\t")
        read = pyarrow.csv.ReadOptions(use_threads=False)
        return lambda: len(pyarrow.csv.read_csv(path, read_options=read, parse_options=parse))

    def count() -> int:
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
        return sum(len(batch) for batch in file.iter_batches(1 << 16, use_threads=False))

    return count


def in_batches(batches: Iterable[dict[str, torch.Tensor]]) -> Callable[[], int]:
    """One epoch."""
    return lambda: sum(len(batch["label"]) for batch in batches)


def rate(count: Callable[[], int]) -> float:
    """Rows a second of CPU time, of all threads: what one core does."""
    began = time.process_time()
    rows = count()
    return rows / (time.process_time() - began)


def compare(folder: Path, rows: int, rounds: int) -> list[str]:
    """Rows of the table: Arrow alone and ours in turn, the median of the rounds."""
    paths = written(folder, rows)
    lines = [
        "| file | bytes a row | Arrow alone, M rows/s a core | tensors, M rows/s a core | ratio |",
        "|---|--:|--:|--:|--:|",
    ]
    for kind, columns in (("ids", IDS), ("strings", STRINGS), ("text", STRINGS)):
        path = paths[kind]
        alone, ours = arrow_alone(path), in_batches(files.read(path, columns, batch_size=BATCH))
        pairs = [(rate(alone), rate(ours)) for _ in range(rounds + 1)][1:]
        first, second = (statistics.median(each) for each in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        what = {"ids": "Parquet, int64 ids", "strings": "Parquet, strings hashed", "text": "TSV, strings hashed"}[kind]
        size = path.stat().st_size / rows
        lines.append(f"| {what} | {size:.0f} | {first / 1e6:.2f} | {second / 1e6:.2f} | {ratio:.2f} |")
    return lines


def memory(folder: Path, rows: int) -> list[str]:
    """The peak of a process that reads a file of one row group, and of several."""
    lines = ["| file | memory at its peak, MB |", "|---|--:|"]
    for name, group in (("row groups of 131,072", GROUP_ROWS), (f"one row group of {rows:,}", rows)):
        path = folder / f"memory-{group}.parquet"
        pq.write_table(click_table(rows), path, row_group_size=group)
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.files", "--peak", str(path)], capture_output=True, text=True, check=True
        )
        lines.append(f"| {rows:,} rows ({rows * 161 / 1e6:.0f} MB decoded), {name} | {float(done.stdout):.0f} |")
    return lines


def peak(path: Path) -> float:
    """MB of resident memory that reading the file takes at most."""
    batches = files.read(path, IDS, batch_size=BATCH)
    # The kernel's highest mark begins again.
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    in_batches(batches)()
    return (status("VmHWM") - before) / 1024


def status(name: str) -> int:
    """A number that the kernel shows of this process, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


TRAINING = """
import sys, time, torch, ps_worker
from ps_worker import files, rows
from ps_worker.tables import Table
from torch import nn
sys.path.insert(0, {examples!r})
from clicks.models import Dlrm
from benchmarks.files import CATEGORIES, IDS, NUMBERS
torch.set_num_threads(1)
with ps_worker.connect() as cluster:
    tables = {{name: Table(16, name=name, optimizer=rows.Adagrad(lr=0.05)) for name in CATEGORIES}}
    model = Dlrm(cluster.embedding_bags(tables, mode="sum"), 16)
    optimizer = cluster.optimizer(torch.optim.Adam, model, lr=0.002)
    columns = {{**IDS, **{{name: files.ids(name) for name in CATEGORIES}}}}
    batches = cluster.files({pattern!r}, columns, batch_size={batch}, name="clicks")
    began = None
    for batch in cluster.prefetch(batches, lambda batch: {{name: batch[name][:, None] for name in CATEGORIES}}):
        if began is None:
            began, waited, samples = time.perf_counter(), cluster._session.progress.counters.data_wait_seconds, 0
        logits = model(batch["numbers"], {{name: batch[name][:, None] for name in CATEGORIES}})
        nn.functional.binary_cross_entropy_with_logits(logits, batch["label"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        samples += len(logits)
    seconds = time.perf_counter() - began
    waited = cluster._session.progress.counters.data_wait_seconds - waited
    print("RESULT", samples, seconds, waited, flush=True)
"""


def training(folder: Path, rows: int, workers: int) -> list[str]:
    """The click model through ps-run: samples a second, and the part of the time that workers wait for rows."""
    path = folder / "train.parquet"
    pq.write_table(click_table(rows), path, row_group_size=GROUP_ROWS)
    script = folder / "train.py"
    examples = str(Path(__file__).parents[1] / "examples")
    lines = ["| mode | batch | samples/s | waiting for rows, % of the time of each worker |", "|---|--:|--:|--:|"]
    for mode, batch in (("async", 1024), ("async", 128), ("sync", 1024)):
        script.write_text(TRAINING.format(examples=examples, pattern=str(path), batch=batch))
        job = ["--no-progress", "--shards", "1", "--workers", str(workers), "--mode", mode, str(script)]
        done = subprocess.run(
            [sys.executable, "-m", "ps_server.cli.launcher.main", *job],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        found = [line.split("RESULT", 1)[1].split() for line in done.stdout.splitlines() if "RESULT" in line]
        if done.returncode or not found:
            raise RuntimeError(done.stdout + done.stderr)
        samples = sum(float(each[0]) / float(each[1]) for each in found)
        shares = ", ".join(f"{100 * float(each[2]) / float(each[1]):.2f}" for each in found)
        lines.append(f"| {mode} | {batch:,} | {samples:,.0f} | {shares} |")
    return lines


def main() -> None:
    """Measure and print three tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the files that are read; default 1000000")
    parser.add_argument("--train-rows", type=int, default=200_000, help="that are trained; default 200000")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--workers", type=int, default=2, help="of the click model; default 2")
    parser.add_argument("--peak", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.peak:
        print(peak(args.peak))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shown(compare(folder, args.rows, args.rounds))
        shown(memory(folder, args.rows))
        shown(training(folder, args.train_rows, args.workers))


def shown(lines: list[str]) -> None:
    """Print a table."""
    print("\n".join(lines) + "\n", flush=True)


if __name__ == "__main__":
    main()
