"""The memory that pushes are sent from: gradients and buffer values in the layout of each shard's region.

``Gradients`` is what a model has: one memory, or two in turn, so that the next gradients are computed where nothing is
sent.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ps_protocol.errors import InternalError, InvalidRequest
from ps_protocol.model.layout import Range
from ps_protocol.model.spec import Kind
from ps_protocol.wire.shared_memory import SharedMemory, can_map_privately
from ps_worker.memory.blocks import HOST, FlatMemory, Homes
from ps_worker.memory.moved_slices import MovedSlices
from ps_worker.memory.parked import ParkedGradients
from ps_worker.memory.plan import FlatPlan
from ps_worker.memory.users import expected_users, users
from ps_worker.model.bindings import Bindings
from ps_worker.tables.row_payloads import RowUpdate

_SMALL_BYTES = 64 << 10
_IN_NUMPY = frozenset({torch.float32, torch.float64})


class GradientBuffers:
    """One memory; used by one thread at a time.

    A shard's block is memory of this worker, or a shared segment that the shard applies gradients from. When the block
    is replaced, its content is copied. Gradients are copied into it, unless they are there already
    (``keep_in_place``).
    """

    def __init__(self, plan: FlatPlan, bindings: Bindings, *, mappable: bool = False) -> None:
        """``mappable``: its memory is in segments, where the system has them, so that gradients can be ``parked``."""
        self._plan = plan
        self._mappable = mappable
        self._parked: ParkedGradients | None = None
        self._bindings = bindings
        self._devices = bindings.devices
        self._mirrored = any(device != HOST for device in self._devices)
        self._blocks: list[FlatMemory | None] = [None] * len(plan.layouts)
        #: For each variable, its slices here and the rows of each.
        self._views: list[list[torch.Tensor]] = [[] for _ in plan.variables]
        self._rows: list[list[Range]] = [[] for _ in plan.variables]
        #: For each parameter, its view where it is in one run of bytes.
        self._whole: list[torch.Tensor | None] = []
        #: Whether every parameter has one.
        self._no_split = False
        #: All gradients flat, one or more pieces for each arena: small ones, and others with the type of their sums.
        #: None: not looked up since memory changed.
        self._arenas: tuple[list[npt.NDArray[Any]], list[tuple[torch.Tensor, torch.dtype]]] | None = None
        #: What has no block yet since slices moved; and gradients that were views of this memory then, by variable.
        self._moved = MovedSlices()
        self._in_place: dict[int, torch.Tensor | None] = {}

    @torch.no_grad()
    def place(self, shard: int, segment: SharedMemory | None = None) -> None:
        """Use ``segment`` for this shard from now on; None: memory of this worker."""
        self._part()
        old, layout = self._blocks[shard], self._plan.layouts[shard]
        if segment is None and self._mappable and layout.region_bytes:
            with suppress(OSError):
                segment = SharedMemory.create(layout.region_bytes)
        own = self._moved.own_memory(shard) if segment is None else None
        block = self._blocks[shard] = FlatMemory(layout.region_bytes, self._homes(shard), segment, own)
        if old is not None:
            block.take_over(old)
        elif self._moved:
            self._moved.bring(layout, block, self._devices)
            if not self._moved:
                # Only now nothing is needed any more where slices were before.
                for each in self._blocks:
                    if each is not None:
                        each.trim()
        self._bind()

    def lay_out(self, plan: FlatPlan) -> None:
        """Slices have moved between shards: what was collected last is in its place when their shards have blocks."""
        self._part()
        self._moved.begin(self._views, self._rows, self._blocks)
        parameters = self._bindings.parameters
        for number, whole in enumerate(self._whole):
            if whole is not None and parameters[number].grad is whole:
                if number in plan.unparted:
                    self._in_place[number] = whole
                else:  # others use its memory from here on
                    parameters[number].grad = whole.clone()
        self._plan = plan
        self._blocks = [None] * len(plan.layouts)
        self._bind()

    def segment(self, shard: int) -> SharedMemory | None:
        """The segment with the shard's region; None: it is in none."""
        block = self._blocks[shard]
        return block.segment if block is not None else None

    def has_place(self, shard: int) -> bool:
        """Whether there is memory for this shard."""
        return self._blocks[shard] is not None

    def pieces(self, shard: int, ranges: Sequence[Range]) -> list[memoryview]:
        """Bytes of the shard's region, to be sent."""
        return (self._blocks[shard] or self._block(shard)).pieces(ranges)

    def memory(self, shard: int) -> memoryview:
        """All bytes of the shard's region, without those that are still being copied from a device."""
        return self._block(shard).bytes

    def region(self, shard: int) -> torch.Tensor:
        """All bytes of the shard's region, uint8, as collected last."""
        return self._block(shard).host

    @torch.no_grad()
    def gather(self, number: int) -> None:
        """Take the gradient of one variable early; the caller copies it to the host."""
        self._place_all()
        grad, whole = self._bindings.parameters[number].grad, self._whole[number]
        if grad is None or grad is whole:
            return
        if whole is not None:
            whole.copy_(grad)
            return
        for view, (begin, end) in zip(self._views[number], self._rows[number], strict=True):
            view.copy_(grad[begin:end])

    def bring(self, shard: int, span: Range) -> Callable[[], None]:
        """Queue the copies of bytes ``span`` from devices to the host; returns a function that waits for them."""
        return self._block(shard).bring(span)

    def collect(self, done: Container[int] = ()) -> tuple[int, ...]:
        """Gather every ``param.grad`` but those ``done``; returns the numbers of the variables that have none.

        Called where torch records no gradients. Raises InvalidRequest for a sparse gradient.
        """
        if None in self._blocks:
            self._place_all()
        if self._parked:
            self._part_kept()
        # Whether all are in this memory takes less than half the time of looking at each.
        gradients = map(operator.attrgetter("grad"), self._bindings.parameters)
        in_place = self._no_split and all(map(operator.is_, gradients, self._whole))
        absent = () if in_place else self._copy_in(done)
        for shard, layout in enumerate(self._plan.layouts if self._mirrored else ()):
            self._block(shard).to_host((0, layout.parameter_bytes))
        return absent

    def _copy_in(self, done: Container[int]) -> tuple[int, ...]:
        targets, sources, absent = [], [], []
        for number, (parameter, whole) in enumerate(zip(self._bindings.parameters, self._whole, strict=True)):
            grad = parameter.grad
            if grad is not None and (grad is whole or number in done):
                continue
            if grad is None:
                absent.append(number)
            elif grad.is_sparse:
                raise InvalidRequest(
                    "a gradient is sparse, and variables are dense",
                    variable=self._plan.variables[number].name,
                    remedy="make the layer with sparse=False, or keep its rows in a table, which pushes the rows used: "
                    "cluster.embedding(...), or cluster.convert_embeddings(model) before cluster.optimizer(...)",
                )
            elif whole is not None:
                targets.append(whole)
                sources.append(grad)
            else:
                targets += self._views[number]
                sources += [grad[begin:end] for begin, end in self._rows[number]]
        if targets:
            torch._foreach_copy_(targets, sources)
        return tuple(absent)

    @torch.no_grad()
    def collect_buffers(self) -> None:
        """Copy the module's buffers into the memory. Raises InvalidRequest for one of another shape."""
        self._place_all()
        first = len(self._bindings.parameters)
        targets, sources = [], []
        for number, value in enumerate(self._bindings.buffer_values(), first):
            whole = self._rows[number] == [(0, self._plan.variables[number].rows)]
            targets += self._views[number]
            sources += [value] if whole else [value[begin:end] for begin, end in self._rows[number]]
        if targets:
            torch._foreach_copy_(targets, sources)
        for shard, layout in enumerate(self._plan.layouts if self._mirrored else ()):
            self._block(shard).to_host((layout.parameter_bytes, layout.region_bytes))

    def keep_in_place(self) -> None:
        """Make every ``param.grad`` a view of this memory where possible, with unspecified values.

        Gradients that backward accumulates there are pushed without a copy.
        """
        for parameter, whole in zip(self._bindings.parameters, self._whole, strict=True):
            if parameter.grad is not None and whole is not None and not parameter.grad.is_sparse:
                parameter.grad = whole

    def make_views_again(self) -> None:
        """Storages have been moved by others: a gradient in one is pushed from there, as any other tensor is."""
        self._part()
        self._whole = []
        self._in_place.clear()
        self._bind()

    # -- where pushes overlap with the computation of the next gradients

    @property
    def may_park(self) -> bool:
        """Whether gradients in this memory can be parked."""
        self._place_all()
        return can_map_privately() and all(block.is_mappable for block in self._blocks if block is not None)

    def keep_unheld_in_place(self, other: GradientBuffers) -> None:
        """As ``keep_in_place``, without gradients that somebody else holds; they may be in or parked from ``other``."""
        self._part_kept()
        for number, parameter in enumerate(self._bindings.parameters):
            grad, whole = parameter.grad, self._whole[number]
            if grad is None or whole is None or grad is whole or grad.is_sparse:
                continue
            containers = max(self._containers_of(number, grad), other._containers_of(number, grad))
            if users(grad) == expected_users(containers, is_gradient=True):
                parameter.grad = whole

    def _containers_of(self, number: int, gradient: torch.Tensor) -> int:
        """How many containers here hold the gradient of a parameter."""
        if self._whole and gradient is self._whole[number]:
            return self._containers(number)
        return int(self._parked is not None and self._parked.has(number, gradient))

    def _containers(self, number: int) -> int:
        """How many containers hold the view of a whole variable: one with several slices is not that of a slice."""
        return 2 if len(self._views[number]) == 1 else 1

    def are_held(self) -> bool:
        """Whether somebody else holds a gradient in this memory, so that it cannot be parked."""
        for number, parameter in enumerate(self._bindings.parameters):
            whole = self._whole[number] if self._whole else None
            if whole is None or parameter.grad is not whole:
                continue
            if users(whole) != expected_users(self._containers(number), is_gradient=True):
                return True
        return False

    def park(self) -> None:
        """Before a push: make every gradient in this memory a tensor of its values that may be written meanwhile."""
        parameters = self._bindings.parameters
        inside = [n for n, whole in enumerate(self._whole) if whole is not None and parameters[n].grad is whole]
        if inside:
            self._parked = self._parked or ParkedGradients(self._plan, self._blocks)
            for number, gradient in zip(inside, self._parked.take(inside), strict=True):
                parameters[number].grad = gradient

    def _part_kept(self) -> None:
        """Before it is written: tensors that were parked, and that somebody keeps who has other gradients now, stay."""
        if self._parked and self._parked.are_kept(self._bindings.parameters):
            self._part()

    def _part(self) -> None:
        """Before it is replaced: what is parked keeps its values."""
        if self._parked:
            self._parked.part()
        self._parked = None

    def first_nonfinite(self, absent: tuple[int, ...]) -> str | None:
        """Name of the first present variable whose gradient, as collected last, holds NaN or infinity; else None.

        Each variable is checked only when its arena seems not to be finite: a sum of large finite values may overflow,
        and absent variables may hold any values.
        """
        if self._seems_finite():
            return None
        missing = frozenset(absent)
        for number in range(len(self._bindings.parameters)):
            if number not in missing and not all(bool(view.isfinite().all()) for view in self._views[number]):
                return self._plan.variables[number].name
        return None

    @torch.no_grad()
    def squared_norm(self, absent: tuple[int, ...], rows: RowUpdate | None = None) -> float:
        """The sum of squares of all present gradients, as collected last, and of ``rows``: what shards clip a push by
        that they apply alone.
        """
        missing = frozenset(absent)
        present = (view for n in range(len(self._bindings.parameters)) if n not in missing for view in self._views[n])
        wide = torch.float32
        norms = (torch.linalg.vector_norm(v, dtype=torch.promote_types(v.dtype, wide)) for v in present)
        of_rows = [each.squared_norm() for each in rows.tables] if rows is not None else []
        return sum((float(norm) * float(norm) for norm in norms), sum(of_rows))

    def _seems_finite(self) -> bool:
        """Whether no arena holds NaN or infinity: one pass each, in numpy where calling torch would take longer."""
        if self._arenas is None:
            parts = self._found_arenas()
            small = [part.nbytes <= _SMALL_BYTES and part.device == HOST and part.dtype in _IN_NUMPY for part in parts]
            self._arenas = (
                [part.numpy() for part, is_small in zip(parts, small, strict=True) if is_small],
                [
                    (part, torch.promote_types(part.dtype, torch.float32))
                    for part, is_small in zip(parts, small, strict=True)
                    if not is_small
                ],
            )
        arrays, tensors = self._arenas
        for values in arrays:
            if not np.logical_and.reduce(np.isfinite(values)):
                return False
        if not tensors:
            return True
        sums = [part.sum(dtype=wide) for part, wide in tensors]
        return all(math.isfinite(total.item()) for total in sums)

    def _found_arenas(self) -> list[torch.Tensor]:
        return [
            part.view(getattr(torch, arena.key.dtype.value))
            for shard, layout in enumerate(self._plan.layouts)
            for arena in layout.arenas
            if arena.key.kind is Kind.PARAMETER
            for part in self._block(shard).parts((arena.begin, arena.end))
        ]

    def _place_all(self) -> None:
        for shard, block in enumerate(self._blocks):
            if block is None:
                self.place(shard)

    def _block(self, shard: int) -> FlatMemory:
        block = self._blocks[shard]
        if block is None:
            raise InternalError(f"no memory for gradients of shard {shard}")
        return block

    def _homes(self, shard: int) -> Homes:
        homes: dict[torch.device, list[Range]] = {}
        for span in self._plan.layouts[shard].slices:
            homes.setdefault(self._devices[span.slice.variable], []).append((span.begin, span.padded_end))
        return homes

    def _bind(self) -> None:
        """Make all views of the present memory; gradients that were views become views of it too."""
        self._arenas, parameters = None, self._bindings.parameters
        self._view_slices()
        old = self._whole or [None] * len(parameters)
        old = [self._in_place.get(number, before) for number, before in enumerate(old)]
        self._whole = [self._whole_view(number) for number in range(len(parameters))]
        self._no_split = all(view is not None for view in self._whole)
        for number, (before, after) in enumerate(zip(old, self._whole, strict=True)):
            if before is not None and after is not None and parameters[number].grad is before:
                parameters[number].grad = after
                self._in_place.pop(number, None)
        if not self._moved:
            self._in_place.clear()

    def _view_slices(self) -> None:
        """Find each variable's slices that have a block, in the order of its rows."""
        found: list[list[tuple[Range, torch.Tensor]]] = [[] for _ in self._plan.variables]
        for layout, block in zip(self._plan.layouts, self._blocks, strict=True):
            if block is None:
                continue
            for span in layout.slices:
                number = span.slice.variable
                view = block.view(self._devices[number], span.begin, span.variable.dtype, span.shape)
                found[number].append(((span.slice.row_begin, span.slice.row_end), view))
        for slices in found:
            slices.sort(key=lambda pair: pair[0])
        self._views = [[view for _, view in slices] for slices in found]
        self._rows = [[rows for rows, _ in slices] for slices in found]

    def _whole_view(self, number: int) -> torch.Tensor | None:
        """The view of a whole parameter: that of its only slice, or another one over slices that are neighbours.

        None: it is not in one run of bytes, or has no block.
        """
        if number not in self._plan.unparted:
            return None
        shard, (begin, _) = self._plan.unparted[number]
        if (block := self._blocks[shard]) is None:
            return None
        variable, slices = self._plan.variables[number], self._views[number]
        if len(slices) == 1:
            return slices[0]
        return block.view(self._devices[number], begin, variable.dtype, variable.shape)


@dataclass(slots=True)
class _Missed:
    """What happened while the training thread used a memory, to be done before it is used again."""

    plan: FlatPlan | None = None
    segments: dict[int, SharedMemory] = field(default_factory=dict)


class Gradients:
    """The memory of one model's gradients; two, where exchanges overlap with the computation of the next gradients.

    The push under way is in ``pushed``, which belongs to the thread that makes the exchange. That calls ``place`` and
    ``lay_out``, too; the training thread has everything between exchanges. With two memories ``keep_in_place`` makes
    gradients views of the other one. A gradient in the memory of a push is parked: the user has its values and may
    write them. A gradient that somebody else uses stays the tensor that it is, and is copied.
    """

    def __init__(self, plan: FlatPlan, bindings: Bindings, *, doubled: bool = False, on_host: bool = False) -> None:
        """``doubled``: two memories; all parameters are on the CPU. ``on_host``: other workers may map them."""
        self._memories = [GradientBuffers(plan, bindings, mappable=doubled or on_host) for _ in range(1 + doubled)]
        #: Gradients stay in memory of this worker: those that a shard shares hold what is pushed.
        self.on_host = on_host
        #: The memory of the last push.
        self.pushed = self._memories[0]
        #: Segments of a shard for these memories, and the number of the one that a push is in, from 1.
        self.segments, self.segment = len(self._memories), 1
        #: Number of the memory that gradients are kept in.
        self._kept = 0
        self._missed = [_Missed() for _ in self._memories]
        self._lock = threading.Lock()

    # -- the training thread

    def keep_in_place(self, *, pushing: bool = False) -> None:
        """Make gradients views of memory that they are pushed from without a copy, where possible.

        Their values are unspecified then. ``pushing``: the last push may be under way; with one memory this does
        nothing.
        """
        if len(self._memories) == 1:
            if not pushing:
                self.pushed.keep_in_place()
            return
        if pushing and self._kept == self.segment - 1:
            self._kept = 2 - self.segment
        memory = self._caught_up(self._kept)
        if memory.may_park:
            memory.keep_unheld_in_place(self._memories[1 - self._kept])

    def collect(self, done: Container[int] = ()) -> tuple[int, ...]:
        """As ``GradientBuffers.collect``. No exchange is under way."""
        if len(self._memories) > 1:
            if not done:
                held = self._caught_up(self._kept).are_held()
                self.segment = 1 + (1 - self._kept if held else self._kept)
            self.pushed = self._caught_up(self.segment - 1)
        return self.pushed.collect(done)

    def make_views_again(self) -> None:
        """As ``GradientBuffers.make_views_again``. No exchange is under way."""
        for number in range(len(self._memories)):
            self._caught_up(number).make_views_again()

    def _caught_up(self, number: int) -> GradientBuffers:
        with self._lock:
            missed, self._missed[number] = self._missed[number], _Missed()
        memory = self._memories[number]
        if missed.plan is not None:
            memory.lay_out(missed.plan)
        for shard, segment in missed.segments.items():
            memory.place(shard, segment)
        return memory

    # -- the thread that makes the exchange

    def place(self, shard: int, *segments: SharedMemory) -> None:
        """Use a shard's ``segments``, one for each memory, from now on; none: memory of this worker."""
        self.pushed.place(shard, *segments[self.segment - 1 : self.segment])
        for number, segment in enumerate(segments):
            if number != self.segment - 1:
                with self._lock:
                    self._missed[number].segments[shard] = segment

    def lay_out(self, plan: FlatPlan) -> None:
        """As ``GradientBuffers.lay_out``."""
        self.pushed.lay_out(plan)
        with self._lock:
            self._missed = [_Missed(None if memory is self.pushed else plan) for memory in self._memories]
