"""The floor of a step: what one process pays for the optimizer and for one copy, with nothing between processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from benchmarks.crew import Crew
from benchmarks.processes import Child
from benchmarks.rows import Key, Subject
from benchmarks.timing import Loop

SYSTEM = "one process"
COPY, APPLY, APPLY_2 = "memory copy", "fused SGD", "fused SGD, 2 threads"


def subject(nbytes: int) -> Subject:
    """Rows of the floor for ``nbytes`` of parameters."""

    @contextmanager
    def opened() -> Iterator[Crew]:
        with Child(worker, nbytes) as child:
            child.ready()
            yield Crew([child], rests=[child])

    return Subject(tuple(Key(SYSTEM, operation, nbytes) for operation in (COPY, APPLY, APPLY_2)), opened)


@contextmanager
def worker(nbytes: int) -> Iterator[Loop]:
    """The role of the process that is timed."""
    parameters, _, apply = sgd(nbytes)
    target = torch.zeros_like(parameters)

    def with_threads(threads: int) -> Callable[[], object]:
        def run() -> None:
            torch.set_num_threads(threads)
            apply()

        return run

    def copy() -> None:
        torch.set_num_threads(1)
        target.copy_(parameters)

    yield Loop({COPY: copy, APPLY: with_threads(1), APPLY_2: with_threads(2)})


def sgd(nbytes: int, tensors: int = 1) -> tuple[torch.Tensor, torch.Tensor, Callable[[], object]]:
    """Flat parameters, flat gradient, and a function that applies the gradient with torch's own fused SGD.

    Both are float32 and their memory is touched; with ``tensors`` > 1 torch sees that many views of them.
    """
    flat = torch.zeros(nbytes // 4)
    gradient = torch.ones(nbytes // 4)
    parameters = []
    for values, slope in zip(flat.chunk(tensors), gradient.chunk(tensors), strict=True):
        parameter = torch.nn.Parameter(values)
        parameter.grad = slope
        parameters.append(parameter)
    return flat, gradient, torch.optim.SGD(parameters, lr=1e-6, fused=True).step
