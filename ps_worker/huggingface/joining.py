"""Where a worker begins that comes to a training which the others have begun."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any


def running_step(version: int, first: Mapping[str, int], updates_per_step: int) -> int:
    """The optimizer step at which the others are, when the model has ``version``.

    ``first`` tells the "version" of the model and the "step" with which the training began. A step of all workers is
    one update in sync, else one per worker.
    """
    return first["step"] + max(0, version - first["version"]) // updates_per_step


def advance(scheduler: Any, steps: int) -> None:
    """Bring a scheduler to where ``steps`` optimizer steps would; one that looks at metrics stays as it is."""
    if "metrics" in inspect.signature(scheduler.step).parameters:
        return
    with warnings.catch_warnings():
        # That the optimizer has made no step: here it has not, on the shards it has.
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(steps):
            scheduler.step()
