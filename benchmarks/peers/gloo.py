"""Data parallelism without a server: gloo's all-reduce of the same bytes between two processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import distributed

from benchmarks.crew import Crew
from benchmarks.processes import Child
from benchmarks.rows import Key, Subject
from benchmarks.timing import Loop

SYSTEM = "gloo"
ALL_REDUCE = "all-reduce"

_WORLD = 2


def subject(nbytes: int) -> Subject:
    """Time until the sum of ``nbytes`` of float32 is in both processes, seen by one of them; nothing is applied."""

    @contextmanager
    def opened() -> Iterator[Crew]:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ps-bench-")))
            store = f"file://{folder / 'store'}"
            children = [stack.enter_context(Child(member, store, rank, nbytes)) for rank in range(_WORLD)]
            for child in children:
                child.ready()
            yield Crew(children, rests=children, timed=1)

    return Subject((Key(SYSTEM, ALL_REDUCE, nbytes, workers=_WORLD),), opened)


@contextmanager
def member(store: str, rank: int, nbytes: int) -> Iterator[Loop]:
    """The role of both processes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=_WORLD)
    gradient = torch.ones(nbytes // 4)

    def all_reduce() -> None:
        distributed.all_reduce(gradient)

    yield Loop({ALL_REDUCE: all_reduce})
    os._exit(0)  # the other one may be gone already
