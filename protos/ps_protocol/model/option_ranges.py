"""The values that arguments of optimizers may have: none with which a step could fail half-way.

torch checks some arguments when an optimizer is made, others when its step uses them, and some never. Here every
argument has a range; inside all of them no step raises, whatever gradients and state hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from ps_protocol.errors import UnsupportedOptimizer
from ps_protocol.model.optimizers import LATE_RATES
from ps_protocol.model.spec import DType, Kind, ModelSpec, Option, Options, StalePolicy, StaleRule

LARGEST = 1e9
"""Upper limit of arguments: torch fails on numbers that a float32 cannot hold, also times 1 / (1 - beta)."""

_LARGEST_HALF = 6e4
"""The same for float16, whose largest number is 65504."""


def require_fitting_rule(optimizer: str, stale: StaleRule | None) -> None:
    """Raises UnsupportedOptimizer for a rule for stale gradients that has no effect on the steps of ``optimizer``."""
    if stale is not None and stale.policy is StalePolicy.SCALE and optimizer in LATE_RATES:
        raise UnsupportedOptimizer(
            f"steps of {optimizer} cannot be scaled by their staleness: its step does not depend on the learning rate "
            "of that step",
            expected="stale='accept' or 'reject', which work with every optimizer",
            actual=str(stale),
        )


class _Range(Protocol):
    def admits(self, value: Option, *, half: bool) -> bool:
        """Whether an argument may have this value; ``half``: for parameters in float16."""
        ...


@dataclass(frozen=True, slots=True)
class _Number:
    low: float
    high: float = LARGEST
    #: ``low`` is excluded.
    above: bool = False
    whole: bool = False
    #: Not combined with tensors, so float16 has no own limit.
    scalar: bool = False
    #: The highest for float16.
    half: float = _LARGEST_HALF

    def admits(self, value: Option, *, half: bool) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        high = min(self.high, self.half) if half and not self.scalar else self.high
        return (self.low < value if self.above else self.low <= value) and value <= high

    def __str__(self) -> str:
        kind = "a whole number " if self.whole else ""
        least = f"above {self.low:g}, at most" if self.above else f"{self.low:g} to"
        limited = self.half < self.high and not self.scalar
        return f"{kind}{least} {self.high:.9g}" + (f" ({self.half:g} for float16)" if limited else "")


@dataclass(frozen=True, slots=True)
class _Flag:
    def admits(self, value: Option, *, half: bool) -> bool:
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "True or False"


@dataclass(frozen=True, slots=True)
class _OneOf:
    values: tuple[str | None, ...]

    def admits(self, value: Option, *, half: bool) -> bool:
        return value is None or (isinstance(value, str) and value in self.values)

    def __str__(self) -> str:
        return " or ".join(map(repr, self.values))


@dataclass(frozen=True, slots=True)
class _Or:
    """None, or a number."""

    number: _Number

    def admits(self, value: Option, *, half: bool) -> bool:
        return value is None or self.number.admits(value, half=half)

    def __str__(self) -> str:
        return f"None or {self.number}"


@dataclass(frozen=True, slots=True)
class _List:
    items: tuple[_Range, ...]

    def admits(self, value: Option, *, half: bool) -> bool:
        return (
            isinstance(value, list | tuple)
            and len(value) == len(self.items)
            and all(item.admits(each, half=half) for item, each in zip(self.items, value, strict=True))
        )

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.items))})"


_POSITIVE = _Number(0)
_SHARE = _Number(0, 1)
#: A value nearer to 1 is 1 in float32, and 1 - beta is a divisor.
_BETA = _Number(0, 1 - 1e-7)
_COMMON: Mapping[str, _Range] = {"lr": _POSITIVE, "weight_decay": _POSITIVE, "eps": _POSITIVE, "maximize": _Flag()}
_ADAM: Mapping[str, _Range] = {
    **_COMMON,
    "betas": _List((_BETA, _BETA)),
    "amsgrad": _Flag(),
    "decoupled_weight_decay": _Flag(),
}

_OWN: Mapping[str, Mapping[str, _Range]] = {
    "ASGD": {
        "lambd": _POSITIVE,
        "alpha": _Number(0, 5),  # (1 + lambd * lr * step) ** alpha is a float64
        "t0": _Number(0, 1e18, scalar=True),
    },
    "Adadelta": {"rho": _SHARE},
    "Adafactor": {
        "beta2_decay": _Number(-LARGEST, 0, scalar=True),
        "eps": _List((_Or(_Number(0, half=250)), _POSITIVE)),  # the first is squared
        "d": _Number(1),
    },
    "Adagrad": {"lr_decay": _POSITIVE, "initial_accumulator_value": _POSITIVE},
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adamax": _ADAM,
    "Muon": {
        "lr": _Number(0, half=10),  # times a root of the matrix's shape
        "momentum": _POSITIVE,
        "nesterov": _Flag(),
        "ns_coefficients": _List((_Number(-1e3, 1e3),) * 3),
        "ns_steps": _Number(0, 99, whole=True),
        "adjust_lr_fn": _OneOf(("original", "match_rms_adamw", None)),
    },
    "NAdam": {**_ADAM, "momentum_decay": _POSITIVE},
    "RAdam": _ADAM,
    "RMSprop": {"alpha": _SHARE, "momentum": _POSITIVE, "centered": _Flag()},
    "Rprop": {
        "etas": _List((_Number(0, 1, above=True), _Number(1, 1e4, above=True))),
        "step_sizes": _List((_POSITIVE, _POSITIVE)),
    },
    "SGD": {"momentum": _POSITIVE, "dampening": _Number(-LARGEST), "nesterov": _Flag()},
}

#: By optimizer, the ranges of its arguments. Others are execution hints of torch, or unknown to it.
RANGES: Mapping[str, Mapping[str, _Range]] = MappingProxyType(
    {f"torch.optim.{name}": {**_COMMON, **own} for name, own in _OWN.items()}
)


def out_of_range(optimizer: str, options: Mapping[str, Any], *, half: bool) -> Iterator[tuple[str, str]]:
    """The arguments that are out of range, each with its range in words."""
    ranges = RANGES.get(optimizer, {})
    for name, value in options.items():
        if name in ranges and not ranges[name].admits(value, half=half):
            yield name, str(ranges[name])


def first_out_of_range(spec: ModelSpec, options: Sequence[Mapping[str, Any]]) -> tuple[int, str, str] | None:
    """Group, name and range in words of the first argument out of range; one entry of ``options`` per group."""
    for group, each in enumerate(options):
        found = next(out_of_range(spec.optimizer, each, half=True), None)
        # Float16 is checked only where it matters: a model may have very many variables.
        if found is not None and not _holds_float16(spec, group):
            found = next(out_of_range(spec.optimizer, each, half=False), None)
        if found is not None:
            return group, *found
    return None


def require_in_range(spec: ModelSpec, options: Sequence[Options]) -> None:
    """Raises UnsupportedOptimizer when an argument is out of range; one entry of ``options`` per group."""
    if found := first_out_of_range(spec, options):
        group, name, expected = found
        raise UnsupportedOptimizer(
            f"{spec.optimizer} of model '{spec.name}' cannot run with this '{name}' in group {group}",
            expected=expected,
            actual=f"{options[group][name]!r:.80}",
            remedy="give a value in this range; nothing was changed",
        )


def _holds_float16(spec: ModelSpec, group: int) -> bool:
    return any(v.kind is Kind.PARAMETER and v.group == group and v.dtype is DType.FLOAT16 for v in spec.variables)
