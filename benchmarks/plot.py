"""The plot: rate of a step by size, and a small step's time, every way in one picture."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from benchmarks import catalog, ours
from benchmarks.peers import raw_socket, torch_rpc
from benchmarks.report import gigabytes_per_second
from benchmarks.rows import Key, Rows, size

WAYS = (
    (raw_socket.SYSTEM, raw_socket.BOTH, "raw TCP socket (nothing applied)", "0.55"),
    (torch_rpc.TCP, torch_rpc.STEP, "torch RPC, TCP", "tab:orange"),
    (torch_rpc.SHM, torch_rpc.STEP, "torch RPC, shared memory", "tab:brown"),
    (ours.system(ours.GRPC), ours.STEP, "torch-ps, grpc", "tab:cyan"),
    (ours.system(ours.BULK), ours.STEP, "torch-ps, bulk", "tab:blue"),
    (ours.system(ours.SHM), ours.STEP, "torch-ps, shm", "tab:purple"),
)
"""System, operation, label and colour of each line and bar."""


def draw(rows: Rows, path: Path) -> bool:
    """Write a PNG; False, with nothing written, when the rows hold no step of any size."""
    steps = {key for key in rows if any((key.system, key.operation) == way[:2] for way in WAYS)}
    sizes = sorted({key.nbytes for key in steps if key == Key(key.system, key.operation, key.nbytes)})
    if not sizes:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 2), layout="constrained")
    for system, operation, label, colour in WAYS:
        points = _points(rows, system, operation, sizes)
        if points:
            left.plot(*zip(*points, strict=True), marker="o", label=label, color=colour)
    left.set(xscale="log", ylabel="GB/s, both ways together", title="push, apply, pull: rate by size of the model")
    left.set_xticks(sizes, [size(nbytes) for nbytes in sizes])
    left.minorticks_off()
    left.set_ylim(bottom=0)
    left.grid(alpha=0.3)
    left.legend(fontsize="small")
    names = []
    for system, operation, label, colour in WAYS:
        taken = rows.get(Key(system, operation, catalog.SMALL), {}).get("seconds")
        if taken is not None:
            names.append(label)
            bar = right.barh(label, taken.median * 1e6, color=colour)
            right.bar_label(bar, fmt="%.0f", padding=3)
    right.set(xlabel="µs, median", title=f"the same with a model of {size(catalog.SMALL)}")
    right.margins(x=0.15)
    right.invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _points(rows: Rows, system: str, operation: str, sizes: list[int]) -> list[tuple[int, float]]:
    points = []
    for nbytes in sizes:
        key = Key(system, operation, nbytes)
        taken = rows.get(key, {}).get("seconds")
        rate = None if taken is None else gigabytes_per_second(key, taken)
        if rate is not None:
            points.append((nbytes, rate))
    return points
