"""Decides which steps may raise, and undoes one that does: parameters and state are as before it, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.errors import InvalidRequest, UnsupportedOptimizer
from ps_protocol.model.layout import Layout
from ps_protocol.model.option_ranges import LARGEST
from ps_server.optimizers.state import StateEntry

#: Highest values of the state that is one number per parameter; steps are counted in floats.
_HIGHEST = {"step": float(1 << 53), "eta": LARGEST, "mu": 1.0, "mu_product": 1.0}


class StepSkipped(UnsupportedOptimizer):
    """A step raised and was undone: values and state are as before it. The same step raises in a replay."""


def skipped_step(error: Exception, optimizer: str) -> StepSkipped:
    """The error that workers get for ``error``, which a step of ``optimizer`` raised; the step has been undone."""
    return StepSkipped(
        f"a step of {optimizer} failed and was skipped; values and state are as before it",
        actual=f"{type(error).__name__}: {error}"[:300],
        remedy="see the arguments of the optimizer, and the state it was given",
    )


def is_deterministic(error: Exception) -> bool:
    """Whether the same step on the same state would raise again; where memory is short it might not."""
    if isinstance(
        error, ArithmeticError | ValueError | TypeError | LookupError | UnsupportedOptimizer | InvalidRequest
    ):
        return True
    return isinstance(error, RuntimeError) and "memory" not in str(error)


def odd_counter(entries: Iterable[StateEntry]) -> StateEntry | None:
    """The first of the counters in ``entries`` that no step has made, None where there is none."""
    for key, tensor in entries:
        is_counter = tensor.dim() == 0 and tensor.dtype.is_floating_point
        if is_counter and not 0 <= float(tensor) <= _HIGHEST.get(key.name, LARGEST):
            return key, tensor
    return None


def require_counters(layout: Layout, entries: Iterable[StateEntry]) -> None:
    """Raises InvalidRequest for state from outside that no step has made: with it a step could raise half-way."""
    if found := odd_counter(entries):
        key, tensor = found
        known = 0 <= key.slice_index < len(layout.slices)
        raise InvalidRequest(
            f"optimizer state '{key.name}' is out of range",
            variable=layout.slices[key.slice_index].variable.name if known else "",
            shard=str(layout.shard),
            expected=f"0 to {_HIGHEST.get(key.name, LARGEST):g}",
            actual=f"{float(tensor):g}",
            remedy="load a state_dict that was saved after a training step",
        )


@dataclass(frozen=True, slots=True)
class _Kept:
    parameter: Tensor
    values: Tensor
    #: By name, the tensor torch has, and a copy of it.
    state: dict[str, tuple[Tensor, Tensor]]


class Undo:
    """Copies of all parameters and state of one optimizer, made before a step that may raise."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._kept = [
            _Kept(p, p.detach().clone(), {n: (t, t.clone()) for n, t in optimizer.state.get(p, {}).items()})
            for group in optimizer.param_groups
            for p in group["params"]
        ]

    def restore(self) -> None:
        """Write everything back where it was."""
        with torch.no_grad():
            for kept in self._kept:
                kept.parameter.copy_(kept.values)
                for tensor, before in kept.state.values():
                    tensor.copy_(before)
                if kept.state:
                    self._optimizer.state[kept.parameter] = {name: held for name, (held, _) in kept.state.items()}
                else:
                    self._optimizer.state.pop(kept.parameter, None)
