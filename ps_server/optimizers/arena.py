"""Owns how one parameter arena is cut into the parameters that torch steps, and the tensors of their state."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.model.layout import Layout, Range
from ps_server.optimizers.state import StateEntry, StateKey
from ps_server.state.blocks import block_numbers
from ps_server.state.region import Region, Span
from ps_server.state.shifts import Shift, shifts

#: Linux 5.14: madvise brings the pages of a range, to be written.
_POPULATE_WRITE = 23

#: Linux: address space without a promise of memory.
_NO_RESERVE = 0x4000


class StateMemory:
    """Private memory of one Arena, zeroed at first. Positions and sizes are in elements.

    ``touch`` from any thread, the rest where the Arena is used.
    """

    def __init__(self, size: int, reserved: int, dtype: torch.dtype) -> None:
        """Allocate ``size`` elements, and reserve address space for ``reserved`` where the system gives it.

        Raises OSError where there is no room.
        """
        self.dtype = dtype
        least = max(size * dtype.itemsize, mmap.PAGESIZE)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self._mapping = mmap.mmap(-1, max(least, reserved * dtype.itemsize), flags=flags | _NO_RESERVE)
        except (OSError, OverflowError):
            self._mapping = mmap.mmap(-1, least, flags=flags)
        self._values = torch.frombuffer(self._mapping, dtype=dtype)
        self._touched_bytes = 0
        self.touch(size)

    def fits(self, size: int) -> bool:
        """Whether there is address space for ``size`` elements."""
        return size <= len(self._values)

    def touch(self, size: int) -> None:
        """Allocate the pages of the first ``size`` elements, where they fit."""
        end = size * self.dtype.itemsize
        begin = self._touched_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if self._touched_bytes < end <= len(self._mapping):
            # An older kernel does not know the call, and there may be no memory: then pages come as they are written.
            with suppress(OSError):
                self._mapping.madvise(_POPULATE_WRITE, begin, end - begin)
            self._touched_bytes = end

    def trim(self, size: int) -> None:
        """Give the pages behind the first ``size`` elements back to the system."""
        begin = -(-size * self.dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        if begin < self._touched_bytes:
            self._mapping.madvise(mmap.MADV_DONTNEED, begin, self._touched_bytes - begin)
            self._touched_bytes = begin

    def part(self, begin: int, end: int) -> Tensor:
        """Elements [begin, end), as a flat view."""
        return self._values[begin:end]

    def shift(self, shifts: Iterable[Shift], zeros: Iterable[Range]) -> None:
        """Make ``shifts`` in this order, with the interpreter lock released; then write zeros."""
        address, item = self._values.data_ptr(), self.dtype.itemsize
        for move in shifts:
            ctypes.memmove(address + move.target * item, address + move.begin * item, (move.end - move.begin) * item)
        for begin, end in zeros:
            self._values[begin:end].zero_()


#: What torch remembers of a segment besides tensors of its size: equal histories step alike.
_History = tuple[tuple[str, str], ...]


#: By slice index and name.
State = Mapping[int, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class ArenaSegment:
    """Slices [first, last) of an arena that torch steps as one parameter, because their histories are equal."""

    first: int
    last: int
    parameter: Tensor


@dataclass(frozen=True, slots=True)
class _Piece:
    """A segment to be; its state is cut from that of ``source``."""

    block: int
    gone: bool
    history: _History
    first: int
    last: int
    source: ArenaSegment

    def alike(self, other: _Piece) -> bool:
        return (self.block, self.gone, self.history) == (other.block, other.gone, other.history)


class Arena:
    """One parameter arena; called by its ShardOptimizer only.

    How an arena is cut follows from its blocks, the histories of its slices and which are absent, and from nothing
    else: the last elements of a segment round differently in torch's kernels, so a restored shard must cut as the lost
    one did. A segment is within one block.
    Per-element state is one tensor per name for the whole arena; segments hold views of it, so cutting and
    joining copies nothing. ``whole`` gives every slice a segment of its own, in its shape, for good.
    """

    def __init__(self, layout: Layout, number: int, region: Region, *, whole: bool) -> None:
        self._span = layout.arenas[number]
        self.key = self._span.key
        self._whole = whole
        self._region = region
        # Empty slices are left out: they have nothing to step.
        members = [(i, s) for i, s in enumerate(layout.slices) if s.arena == number and s.begin < s.end]
        self._indexes = [index for index, _ in members]
        numbers = block_numbers(layout)
        self._blocks = [numbers[index] for index in self._indexes]
        self._slices = [span for _, span in members]
        self._reserved = layout.largest_arenas[number] // self.key.dtype.itemsize
        self._flat: dict[str, StateMemory] = {}
        self.segments = self._singles() if whole else self._one_per_block()

    def arrange(self, optimizer: Optimizer, absent: frozenset[int]) -> bool:
        """Cut and join segments until each is as long as it can be with slices that are alike; True if any changed.

        Alike: with equal histories, and either all in ``absent`` (slice indexes) or none.
        """
        if self._whole or (self.is_joined and not absent):
            return False
        pieces: list[_Piece] = []
        for segment in self.segments:
            history = _history(optimizer, segment)
            keyed = groupby(range(segment.first, segment.last), lambda i: (self._blocks[i], self._indexes[i] in absent))
            for (block, gone), run in keyed:
                members = list(run)
                piece = _Piece(block, gone, history, members[0], members[-1] + 1, segment)
                if pieces and pieces[-1].alike(piece):
                    piece = replace(pieces.pop(), last=piece.last)
                pieces.append(piece)
        if [(s.first, s.last) for s in self.segments] == [(p.first, p.last) for p in pieces]:
            return False
        states = {s: optimizer.state.pop(s.parameter, {}) for s in self.segments}
        self.segments = [self._cut(optimizer, states[p.source], p.first, p.last) for p in pieces]
        return True

    @property
    def is_joined(self) -> bool:
        """Whether a step in which no slice is absent cuts nothing, whatever the histories are."""
        return not self._whole and len(self.segments) == len(set(self._blocks))

    def spans(self) -> list[Span]:
        """The bytes of each segment."""
        dtype = self._span.key.dtype
        return [(self._slices[s.first].begin, self._slices[s.last - 1].end, dtype) for s in self.segments]

    def rebind(self, region: Region) -> None:
        """Point all parameters at ``region``, whose bytes equal those of the region so far."""
        self._region = region
        for segment in self.segments:
            segment.parameter.data = self._view(region, segment.first, segment.last)

    def attach(self, gradients: Region, absent: frozenset[int]) -> None:
        """Point the present segments at their gradients. Segments must be arranged for ``absent``."""
        for segment in self.segments:
            if self._indexes[segment.first] not in absent:
                segment.parameter.grad = self._gradient(gradients, segment.first, segment.last)

    def detach(self) -> None:
        """Drop the gradients: their owner uses the memory again."""
        for segment in self.segments:
            segment.parameter.grad = None

    def adopt(self, optimizer: Optimizer) -> None:
        """Move per-element state that torch has just made into the tensors of the whole arena."""
        if self._whole:
            return
        for segment in self.segments:
            state = optimizer.state.get(segment.parameter, {})
            for name, tensor in state.items():
                if tensor.dim() == 0:
                    continue
                home = self._home(name, tensor.dtype, segment.first, segment.last)
                if home.data_ptr() != tensor.data_ptr():
                    state[name] = home.copy_(tensor)

    def state(self, optimizer: Optimizer) -> Iterator[StateEntry]:
        """All state, slice by slice, as views."""
        for segment in self.segments:
            state = optimizer.state.get(segment.parameter, {})
            for at in range(segment.first, segment.last):
                for name, tensor in state.items():
                    if not self._whole and tensor.dim():
                        tensor = self._home(name, tensor.dtype, at, at + 1).view(self._slices[at].shape)
                    yield StateKey(self._indexes[at], name), tensor

    def load(self, optimizer: Optimizer, found: State, counters: frozenset[str]) -> None:
        """Replace all state by ``found`` (checked); slices not in it start without state.

        ``counters`` names the state that is one number per parameter, such as "step".
        """
        for segment in self.segments:
            optimizer.state.pop(segment.parameter, None)
        self._flat.clear()
        self.segments = self._singles()
        for segment in self.segments:
            self._put(optimizer, segment, found, counters)
        self.arrange(optimizer, frozenset())

    def follow(
        self,
        before: Arena,
        was: Optimizer,
        optimizer: Optimizer,
        staying: Mapping[int, int],
        found: State,
        counters: frozenset[str],
    ) -> None:
        """Begin with the state that ``before``, of optimizer ``was``, has of slices ``staying``, and with ``found``.

        ``staying``: slice index there to slice index here. Its memory is used again where it can be; ``before`` has no
        state afterwards. ``found`` and ``counters`` as in ``load``.
        """
        places = {index: at for at, index in enumerate(self._indexes)}
        pairs = [(at, places[staying[index]]) for at, index in enumerate(before._indexes) if index in staying]
        self._flat = {name: self._followed(before, memory, pairs) for name, memory in before._flat.items()}
        before._flat = {}
        states: dict[int, Mapping[str, Tensor]] = {}
        for segment in before.segments:
            state = was.state.pop(segment.parameter, {})
            states |= dict.fromkeys(range(segment.first, segment.last), state)
        sources = {here: states[there] for there, here in pairs}
        self.segments = [self._cut(optimizer, sources.get(at, {}), at, at + 1) for at in range(len(self._slices))]
        for segment in self.segments:
            if segment.first not in sources:
                self._put(optimizer, segment, found, counters)
        self.arrange(optimizer, frozenset())

    def expect(self, names: Mapping[str, torch.dtype], size_bytes: int) -> None:
        """Allocate memory for the state of an arena of ``size_bytes``; for ``names`` also where there is no state yet.

        From any thread. Raises OSError where the system has no room.
        """
        size = size_bytes // self.key.dtype.itemsize
        if not self._slices and not self._whole:
            for name, dtype in names.items():
                self._memory(name, dtype)
        for memory in list(self._flat.values()):
            memory.touch(size)

    def trim(self) -> None:
        """Give back memory for state of slices that have left."""
        for memory in self._flat.values():
            memory.trim(self._size)

    def _put(self, optimizer: Optimizer, segment: ArenaSegment, found: State, counters: frozenset[str]) -> None:
        """Make the entries of ``found`` for one slice its state."""
        for name, tensor in found.get(self._indexes[segment.first], {}).items():
            if self._whole or name in counters:
                value = tensor.clone()
            else:
                value = self._home(name, tensor.dtype, segment.first, segment.last).copy_(tensor.flatten())
            optimizer.state[segment.parameter][name] = value

    def _followed(self, before: Arena, memory: StateMemory, pairs: Sequence[tuple[int, int]]) -> StateMemory:
        """``memory`` with the state of slices at their places here; ``pairs``: their numbers there and here."""
        wanted = [Shift(*before._place(there, there + 1), self._place(here, here + 1)[0]) for there, here in pairs]
        moves = shifts(wanted) if memory.fits(self._size) else None
        if moves is None:
            target = StateMemory(self._size, self._reserved, memory.dtype)
            for each in wanted:
                target.part(each.target, each.target + each.end - each.begin).copy_(memory.part(each.begin, each.end))
            return target
        memory.touch(self._size)
        unmoved = {here for (_, here), each in zip(pairs, wanted, strict=True) if each.begin == each.target}
        paddings = [self._padding(at) for at in range(len(self._slices)) if at not in unmoved]
        memory.shift(moves, [(begin, end) for begin, end in paddings if begin < end])
        return memory

    def _one_per_block(self) -> list[ArenaSegment]:
        runs = [list(run) for _, run in groupby(range(len(self._slices)), lambda at: self._blocks[at])]
        return [self._segment(run[0], run[-1] + 1) for run in runs]

    def _singles(self) -> list[ArenaSegment]:
        return [self._segment(at, at + 1) for at in range(len(self._slices))]

    def _segment(self, first: int, last: int) -> ArenaSegment:
        return ArenaSegment(first, last, self._view(self._region, first, last))

    def _view(self, region: Region, first: int, last: int) -> Tensor:
        shape = self._slices[first].shape if self._whole else (-1,)
        return region.tensor(self._slices[first].begin, self._slices[last - 1].end, self._span.key.dtype, shape)

    def _gradient(self, gradients: Region, first: int, last: int) -> Tensor:
        if self._whole:
            return self._view(gradients, first, last)
        return gradients.flat(self._slices[first].begin, self._slices[last - 1].end, self._span.key.dtype)

    def _cut(self, optimizer: Optimizer, state: Mapping[str, Tensor], first: int, last: int) -> ArenaSegment:
        segment = self._segment(first, last)
        if state and self._whole:
            optimizer.state[segment.parameter] = dict(state)
        elif state:
            optimizer.state[segment.parameter] = {
                name: self._home(name, tensor.dtype, first, last) if tensor.dim() else tensor.clone()
                for name, tensor in state.items()
            }
        return segment

    def _home(self, name: str, dtype: torch.dtype, first: int, last: int) -> Tensor:
        """The per-element state ``name`` of slices [first, last), as a view."""
        return self._memory(name, dtype).part(*self._place(first, last))

    def _memory(self, name: str, dtype: torch.dtype) -> StateMemory:
        if name not in self._flat:
            # Zeros: padding that begins with anything else would not stay zero.
            self._flat[name] = StateMemory(self._size, self._reserved, dtype)
        return self._flat[name]

    @property
    def _size(self) -> int:
        return (self._span.end - self._span.begin) // self.key.dtype.itemsize

    def _place(self, first: int, last: int) -> Range:
        """Elements of slices [first, last) in the arena."""
        item, start = self.key.dtype.itemsize, self._span.begin
        return (self._slices[first].begin - start) // item, (self._slices[last - 1].end - start) // item

    def _padding(self, at: int) -> Range:
        item, start, span = self.key.dtype.itemsize, self._span.begin, self._slices[at]
        return (span.end - start) // item, (span.padded_end - start) // item


def _history(optimizer: Optimizer, segment: ArenaSegment) -> _History:
    state = optimizer.state.get(segment.parameter, {})
    return tuple(sorted((name, "" if tensor.dim() else repr(tensor.item())) for name, tensor in state.items()))
