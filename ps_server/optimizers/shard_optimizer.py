"""Owns the torch.optim instance of one model on one shard, and steps it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ps_protocol.model.layout import Layout, SliceSpan, aligned
from ps_protocol.model.option_ranges import first_out_of_range
from ps_protocol.model.spec import Kind, Options
from ps_server.optimizers import catalog
from ps_server.optimizers.arena import Arena
from ps_server.optimizers.fused import FusedStep
from ps_server.optimizers.state import Expected, StateEntry, by_slice
from ps_server.optimizers.undo import Undo, is_deterministic, odd_counter, skipped_step
from ps_server.state.region import Region, Span

T = TypeVar("T")


class ShardOptimizer:
    """Updates the parameters in ``region`` as the model's torch.optim class would update its variables one by one.

    Called by the shard's applier, one call at a time, from any thread. The result depends on the parameters, the state,
    the gradients and the number of torch's threads only, so a replay is bit-equal. Holds the optimizer's state and
    nothing else of the size of the parameters. A variable without a gradient is left alone, as in torch: no decay, no
    momentum, no step counted.
    """

    def __init__(self, layout: Layout, region: Region) -> None:
        """Raises UnsupportedOptimizer or InvalidRequest as ``validate`` does."""
        spec = layout.shard_map.spec
        catalog.validate(spec)
        self._layout = layout
        self._spec = spec
        self._declared = catalog.arguments_of(spec)
        self._options: Sequence[Options] = ()
        self._slices = frozenset(range(layout.parameter_slices))
        whole = catalog.is_shaped(spec)
        self._arenas = [
            Arena(layout, number, region, whole=whole)
            for number, span in enumerate(layout.arenas)
            if span.key.kind is Kind.PARAMETER
        ]
        self._torch = catalog.build(spec, self._groups(), self._declared)
        self._update = catalog.update_of(type(self._torch))
        #: Arguments or state are out of the range that is admitted now: an older version accepted them.
        self._odd_options = first_out_of_range(spec, self._declared) is not None
        self._odd_state = False
        #: Every step can be undone.
        self.careful = catalog.is_registered(spec)
        self._fused = [group.get("fused") is True for group in self._torch.param_groups]
        #: Of the present parameters and state; None: torch makes the next step, and this is looked for after it.
        self._fused_step: FusedStep | None = None
        #: Of the same, by group: where the gradients are in a region; and whether no step without absent slices cuts.
        self._spans: Sequence[Sequence[Span]] = ()
        self._is_joined = False
        for arena in self._arenas:
            arena.adopt(self._torch)

    def apply(
        self,
        gradients: Region,
        absent: frozenset[int] = frozenset(),
        options: Sequence[Options] = (),
        scale: float = 1.0,
    ) -> None:
        """One step. ``gradients`` has this layout and is only read.

        ``absent`` holds the slice indexes without a gradient. ``options`` replaces declared arguments by name, one
        entry per group; none: as declared. ``scale`` multiplies the learning rate of this step (staleness-aware
        asynchronous SGD, Zhang et al. 2016); ASGD and Rprop keep the rate in their state and take it up later or never.

        Raises UnsupportedOptimizer or InvalidRequest for options that torch refuses, before anything is changed, and
        StepSkipped for a step that raised and was undone; any other error may leave half of it. Where arguments and
        state are in range no step raises; only where they are not, or with ``careful``, is a copy kept.
        """
        if options is not self._options:
            self._set_options(options)
        is_odd = self.careful or self._odd_options or self._odd_state
        if absent >= self._slices and not is_odd:
            return  # Rows alone: torch leaves variables without a gradient as they are.
        fused = self._fused_step if not absent and not is_odd else None
        if fused is None or not self._is_joined:
            changed = [arena.arrange(self._torch, absent) for arena in self._arenas]
            if any(changed):
                self._regroup()
                fused = self._fused_step = None
        if fused is not None:
            fused.step(gradients.flats(self._spans), scale)
            return
        undo = Undo(self._torch) if is_odd else None
        try:
            for arena in self._arenas:
                arena.attach(gradients, absent)
            self._step(scale)
        except Exception as error:
            if undo is None or not is_deterministic(error):
                raise
            undo.restore()
            raise skipped_step(error, self._spec.optimizer) from error
        finally:
            for arena in self._arenas:
                arena.detach()
        for arena in self._arenas:
            arena.adopt(self._torch)
        self._fused_step = FusedStep.of(self._torch)
        self._spans = self._grouped(lambda arena: arena.spans())
        self._is_joined = all(arena.is_joined for arena in self._arenas)

    def rebind(self, region: Region) -> None:
        """Continue with the parameters in ``region``, which holds the same bytes as the region so far."""
        for arena in self._arenas:
            arena.rebind(region)

    def state(self) -> list[StateEntry]:
        """The optimizer's state per slice, in slice order. Tensors are views: valid until the next call.

        State of the slice's size has the slice's shape; counters are 0-dimensional; Adafactor's factors are as torch
        keeps them. A slice that never had a gradient has none.
        """
        entries = [entry for arena in self._arenas for entry in arena.state(self._torch)]
        return sorted(entries, key=lambda entry: entry[0].slice_index)

    def load_state(self, entries: Iterable[StateEntry]) -> None:
        """Replace all state; slices without an entry start without any. Training continues bit-equal to the saved one.

        Raises InvalidRequest, before anything is changed, when an entry does not fit this model.
        """
        entries = list(entries)
        found = by_slice(self._layout, entries, self._expected)
        self._odd_state = odd_counter(entries) is not None
        for arena in self._arenas:
            arena.load(self._torch, found, self._counters(arena))
        self._regroup()
        self._fused_step = None

    def follow(self, before: ShardOptimizer, staying: Mapping[int, int], entries: Iterable[StateEntry]) -> None:
        """Begin with what ``before`` has of the slices ``staying``, slice index there to slice index here.

        And with ``entries`` for slices that have come. ``before``, of another layout of the model, has no state
        afterwards. Memory for state is used again, where it can be. Raises as ``load_state``.
        """
        found = by_slice(self._layout, entries, self._expected)
        for arena, left in zip(self._arenas, before._arenas, strict=True):
            arena.follow(left, before._torch, self._torch, staying, found, self._counters(arena))
        before._fused_step = None
        self._odd_state = odd_counter(self.state()) is not None
        self._regroup()

    def expect(self, layout: Layout) -> None:
        """Allocate memory for the state in the next ``layout``. From any thread. Raises OSError without room."""
        parameters = (span for span in layout.arenas if span.key.kind is Kind.PARAMETER)
        for arena, span in zip(self._arenas, parameters, strict=True):
            arena.expect(self._per_element(arena), span.end - span.begin)

    def state_bytes(self, slices: Iterable[SliceSpan]) -> int:
        """Bytes of the state of ``slices``, of any layout, that is of their size; each tensor aligned."""
        items = [[dtype.itemsize for dtype in self._per_element(arena).values()] for arena in self._arenas]
        return sum(
            aligned((span.end - span.begin) // span.variable.dtype.itemsize * item)
            for span in slices
            if span.arena < len(items)
            for item in items[span.arena]
        )

    def trim(self) -> None:
        """Give back memory for state of slices that have left."""
        for arena in self._arenas:
            arena.trim()

    def _step(self, scale: float) -> None:
        groups = self._torch.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] *= scale
        try:
            with torch.no_grad():
                for _ in self._in_turns():
                    self._update(self._torch)
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def _in_turns(self) -> Iterator[None]:
        """Yields with gradients attached: once, or twice where torch must not see all of them in one call.

        Its fused SGD takes the first momentum of all parameters or of none.
        """
        fused = (group for group, is_fused in zip(self._torch.param_groups, self._fused, strict=True) if is_fused)
        present = [p for group in fused for p in group["params"] if p.grad is not None]
        fresh = [(p, p.grad) for p in present if not self._torch.state.get(p)]
        if not fresh or len(fresh) == len(present):
            yield
            return
        for parameter, _ in fresh:
            parameter.grad = None
        yield
        for parameter in (p for group in self._torch.param_groups for p in group["params"]):
            parameter.grad = None
        for parameter, gradient in fresh:
            parameter.grad = gradient
        yield

    def _expected(self, span: SliceSpan) -> Expected:
        key = span.variable
        return catalog.expected_state(self._spec, self._declared, key.group, key.dtype, span.shape)

    def _counters(self, arena: Arena) -> frozenset[str]:
        """Names of the state that is one number per parameter. Arenas that are never joined need not know."""
        if catalog.is_shaped(self._spec):
            return frozenset()
        flat = self._of_one_element(arena)
        return frozenset(name for name, (shape, _) in flat.items() if not shape)

    def _per_element(self, arena: Arena) -> dict[str, torch.dtype]:
        """Names and types of the state that is of the size of its slice."""
        if catalog.is_shaped(self._spec):
            return {}
        return {name: dtype for name, (shape, dtype) in self._of_one_element(arena).items() if shape}

    def _of_one_element(self, arena: Arena) -> Expected:
        return catalog.expected_state(self._spec, self._declared, arena.key.group, arena.key.dtype, (1,))

    def _groups(self) -> list[list[Tensor]]:
        return self._grouped(lambda arena: [segment.parameter for segment in arena.segments])

    def _grouped(self, items: Callable[[Arena], Iterable[T]]) -> list[list[T]]:
        """The ``items`` of all arenas, by parameter group."""
        return [
            [item for arena in self._arenas if arena.key.group == number for item in items(arena)]
            for number in range(len(self._declared))
        ]

    def _regroup(self) -> None:
        for group, parameters in zip(self._torch.param_groups, self._groups(), strict=True):
            group["params"] = parameters

    def _set_options(self, options: Sequence[Options]) -> None:
        if options == self._options:
            return
        arguments = catalog.overridden(self._spec, self._declared, options) if options else self._declared
        for group, values in zip(self._torch.param_groups, arguments, strict=True):
            group.update(values)
        self._options = options
        self._odd_options = first_out_of_range(self._spec, arguments) is not None
