"""``python -m tests.support.compiled``, before the tests begin: compiles what tables need, where it has changed.

Beside it, on another core, the tests of a fresh checkout are collected, which keeps their byte code for the processes
that run them.
"""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Changed when everything had been compiled, by this version of Python.
STAMP = Path(__file__).with_name("__pycache__") / f"tables-compiled.{sys.implementation.cache_tag}"


def is_stale() -> bool:
    """Whether a source of compiled code, or what is installed, is newer than what was compiled."""
    folders = [ROOT / "ps_server" / "tables", *(ROOT / "protos" / "ps_protocol" / name for name in ("model", "wire"))]
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    newest = max(path.stat().st_mtime for path in [*sources, ROOT / "constraints.txt", Path(sys.prefix)])
    return not STAMP.exists() or STAMP.stat().st_mtime < newest


def compile_all() -> None:
    from ps_server import tables
    from tests.support.tables import table_spec

    for optimizer in ("sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"):
        tables.warm_up(table_spec(optimizer=optimizer))
    STAMP.parent.mkdir(exist_ok=True)
    STAMP.touch()


if __name__ == "__main__":
    fresh = not any((ROOT / "tests" / "__pycache__").glob("test_*"))
    collecting = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    # What cannot be collected is reported by the tests themselves.
    with subprocess.Popen(collecting, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) if fresh else nullcontext():
        if is_stale():
            compile_all()
