"""The contract of optimizers that shards run, as checks: for torch's classes, and for those that users register.

Users call ``ps_worker.optimizers.check``, which makes all checks. Each check is named for what it shows, and raises
UnsupportedOptimizer with what it found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ps_protocol.errors import UnsupportedOptimizer
from ps_protocol.model.layout import Layout
from ps_protocol.model.registered_optimizers import name_of, reads_shapes, registered_optimizer
from ps_protocol.model.spec import DType, ModelSpec, Option, ShardMap, Slice, Variable
from ps_server.optimizers.catalog import require_arguments, require_state
from ps_server.optimizers.shard_optimizer import ShardOptimizer
from ps_server.optimizers.state import StateKey
from ps_server.state.region import Region, torch_dtype

SHAPES = ((5, 7), (), (33,), (2, 3, 4), (1,), (16, 2))
"""Variables that the checks train, of sizes around and above a vector register; all are float32 or float64."""

STEPS = 6
"""Steps of each check; what is absent in each differs."""

_TOLERANCE = {DType.FLOAT32: 1e-5, DType.FLOAT64: 1e-10}


@dataclass(frozen=True, slots=True)
class _Push:
    gradients: tuple[Tensor, ...]
    absent: frozenset[int]
    rate: float
    scale: float


class _Shard:
    """A region of variables, or of parts of them, and the optimizer over it."""

    def __init__(self, shard_map: ShardMap, shard: int, values: Sequence[Tensor]) -> None:
        self.layout = Layout.of(shard_map, shard)
        self.region = Region(self.layout)
        self.optimizer = ShardOptimizer(self.layout, self.region)
        self._gradients = Region(self.layout)
        for index, span in enumerate(self.layout.slices):
            self.region.slice(index).copy_(_part(values[span.slice.variable], span.slice))

    def step(self, push: _Push, options: Mapping[str, Option]) -> None:
        absent = set()
        for index, span in enumerate(self.layout.slices):
            self._gradients.slice(index).copy_(_part(push.gradients[span.slice.variable], span.slice))
            if span.slice.variable in push.absent:
                absent.add(index)
        self.optimizer.apply(self._gradients, frozenset(absent), [options], push.scale)

    def values(self) -> dict[int, Tensor]:
        return {span.slice.variable: self.region.slice(index).clone() for index, span in enumerate(self.layout.slices)}

    def state(self) -> dict[StateKey, Tensor]:
        return {key: tensor.clone() for key, tensor in self.optimizer.state()}


class Contract:
    """The checks of one class with one set of arguments; a class of torch, or one that is registered."""

    def __init__(
        self,
        torch_class: type[torch.optim.Optimizer],
        options: Mapping[str, Any],
        *,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        dtype: DType = DType.FLOAT32,
        seed: int = 0,
    ) -> None:
        """``options``: arguments by name, with "lr". ``shapes``: of the variables, for a class that takes some only.

        Raises UnsupportedOptimizer for a class that nobody has registered.
        """
        own = getattr(torch.optim, torch_class.__name__, None) is torch_class
        self._name = f"torch.optim.{torch_class.__name__}" if own else name_of(torch_class)
        self._entry = registered_optimizer(self._name)
        if not own and self._entry is None:
            raise UnsupportedOptimizer(
                f"{self._name} is not registered",
                remedy="decorate it with ps_worker.optimizers.register(elementwise=…)",
            )
        self._class, self._options, self._dtype, self._seed = torch_class, dict(options), dtype, seed
        variables = tuple(Variable(f"v{i}", tuple(shape), dtype) for i, shape in enumerate(shapes))
        as_sent = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
        self._spec = ModelSpec("model", self._name, variables, (as_sent,), unsplit=reads_shapes(self._name))
        self._rows = [variable.rows for variable in variables]

    def check(self) -> None:
        """All checks."""
        self.check_arguments()
        self.check_state()
        self.check_steps()
        self.check_repeats()
        self.check_restores()
        self.check_split()

    def check_arguments(self) -> None:
        """Each argument of the constructor is an option of the groups: it is sent, logged and scheduled."""
        if self._entry is not None:
            require_arguments(self._entry, self._options)

    def check_state(self) -> None:
        """What it remembers are tensors in the state of parameters: snapshots, checkpoints and moves have all of it."""
        if self._entry is not None:
            require_state(self._entry, self._options, self._dtype)

    def check_steps(self) -> None:
        """On a shard it does what it does in one process, whatever is absent: with one learning rate, then others."""
        values, pushes = self._start()
        shard, twin = self._shard(values), [value.clone() for value in values]
        plain = self._class([{**self._options, "params": twin}], **self._defaults())
        for push in pushes:
            shard.step(push, self._at(push))
            for group in plain.param_groups:
                group["lr"] = self._options["lr"] * push.rate * push.scale
            for number, parameter in enumerate(twin):
                parameter.grad = None if number in push.absent else push.gradients[number].clone()
            plain.step()
        found = shard.values()
        for number, value in enumerate(twin):
            self._compare("steps on a shard", f"v{number}", found[number], value)
        state = shard.state()
        for number, parameter in enumerate(twin):
            for name, tensor in plain.state.get(parameter, {}).items():
                key = StateKey(number, name)
                if key not in state:
                    raise self._broken("steps on a shard", f"state '{name}' of v{number}", "none")
                self._compare("steps on a shard", f"state '{name}' of v{number}", state[key], tensor)

    def check_repeats(self) -> None:
        """The same steps on the same values give the same bytes: a log is replayed, not only kept."""
        values, pushes = self._start()
        once, again = (self._trained(self._shard(values), pushes) for _ in range(2))
        self._same("the same steps again", once, again)

    def check_restores(self) -> None:
        """Training goes on from values and state as if it had not been interrupted, to the same bytes."""
        values, pushes = self._start()
        on, half = self._shard(values), len(pushes) // 2
        self._trained(on, pushes[:half])
        restored = self._shard(values)
        restored.region.bytes[:] = on.region.bytes
        restored.optimizer.load_state([(key, tensor) for key, tensor in on.state().items()])
        self._same(
            "steps after values and state were restored",
            self._trained(on, pushes[half:]),
            self._trained(restored, pushes[half:]),
        )

    def check_split(self) -> None:
        """Of an element-wise class: parts of variables on two shards become what whole variables do."""
        if self._spec.unsplit:
            return
        values, pushes = self._start()
        slices = [
            Slice(number, begin, end, shard)
            for number, rows in enumerate(self._rows)
            for shard, (begin, end) in enumerate([(0, rows // 2), (rows // 2, rows)])
            if begin < end
        ]
        cut = ShardMap(1, self._spec, 2, tuple(slices))
        whole = self._shard(values)
        self._trained(whole, pushes)
        parts = [_Shard(cut, shard, values) for shard in range(2)]
        for part in parts:
            self._trained(part, pushes)
            for index, span in enumerate(part.layout.slices):
                expected = _part(whole.values()[span.slice.variable], span.slice)
                self._compare("parts of variables", span.variable.name, part.region.slice(index), expected)

    def _start(self) -> tuple[list[Tensor], list[_Push]]:
        generator = torch.Generator().manual_seed(self._seed)

        def random() -> list[Tensor]:
            dtype = torch_dtype(self._dtype)
            return [torch.randn(v.shape, generator=generator, dtype=dtype) for v in self._spec.variables]

        pushes = []
        for number in range(STEPS):
            absent = {v for v in range(len(self._rows)) if torch.rand((), generator=generator) < 0.25 * (number % 3)}
            pushes.append(
                _Push(tuple(random()), frozenset(absent), (1.0, 1.0, 0.5)[number % 3], (1.0, 0.5)[number % 2])
            )
        return random(), pushes

    def _shard(self, values: Sequence[Tensor]) -> _Shard:
        slices = tuple(Slice(number, 0, rows, 0) for number, rows in enumerate(self._rows))
        return _Shard(ShardMap(1, self._spec, 1, slices), 0, values)

    def _at(self, push: _Push) -> dict[str, Any]:
        return {**self._spec.group_options[0], "lr": self._options["lr"] * push.rate}

    def _trained(self, shard: _Shard, pushes: Sequence[_Push]) -> _Shard:
        for push in pushes:
            shard.step(push, self._at(push))
        return shard

    def _defaults(self) -> dict[str, Any]:
        # torch's Adagrad takes this from the constructor and not from the groups.
        return {n: v for n, v in self._options.items() if n == "initial_accumulator_value"}

    def _compare(self, check: str, what: str, found: Tensor, wanted: Tensor) -> None:
        near = _TOLERANCE.get(self._dtype, 1e-2)
        found, wanted = found.reshape(-1).double(), wanted.reshape(-1).double()
        if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=near, atol=near):
            far = f"{float((found - wanted).abs().max()):g} away" if found.shape == wanted.shape else "another shape"
            raise self._broken(check, f"{what} as in one process", far)

    def _same(self, check: str, one: _Shard, other: _Shard) -> None:
        if bytes(one.region.bytes) != bytes(other.region.bytes):
            raise self._broken(check, "the same values, bit for bit", "others")
        first, second = one.state(), other.state()
        if first.keys() != second.keys() or not all(torch.equal(first[key], second[key]) for key in first):
            raise self._broken(check, "the same state, bit for bit", "another")

    def _broken(self, check: str, expected: str, actual: str) -> UnsupportedOptimizer:
        return UnsupportedOptimizer(
            f"optimizer {self._name} breaks the contract of shards: {check}",
            expected=expected,
            actual=actual,
            remedy="see docs/optimizers.md",
        )


def _part(value: Tensor, piece: Slice) -> Tensor:
    return value[piece.row_begin : piece.row_end] if value.dim() else value
