"""Double-buffers a model's parameters: it computes with one memory while the next parameters arrive in the other."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from operator import itemgetter

import torch

from ps_protocol.cluster.answers import StepAnswer
from ps_protocol.model.layout import Range, aligned, merge
from ps_protocol.model.spec import Kind
from ps_worker.memory.blocks import HOST, FlatMemory, overlap
from ps_worker.memory.plan import FlatPlan
from ps_worker.memory.users import storage_users

LARGE_BYTES = 64 << 10
"""From this size on it costs less to give a parameter its other memory than to copy it."""

_CACHED_PATTERNS = 16


class DoubleBuffer:
    """Used by FlatModel in the training thread; ``expect`` and ``complete`` by the thread that makes the exchange.

    Every variable has the same place in both memories. Its front is the one that the model uses, its back the other.
    ``land`` makes what has arrived the front: a large parameter is given its back memory, and the rest is copied. A
    parameter whose front is used by another tensor (``detach``, ``state_dict``, numpy) is copied too, so that they
    stay one.
    """

    def __init__(
        self,
        plan: FlatPlan,
        both: torch.Tensor,
        first: FlatMemory,
        parameters: Sequence[torch.Tensor],
        views: list[torch.Tensor],
        addresses: list[int],
        apart: Sequence[int],
    ) -> None:
        """``both``: host memory for two, the first half of which is ``first``'s.

        ``views``: each parameter's front, initially in ``first``; kept up to date, like ``addresses``.

        ``apart``: numbers of parameters that keep memory of their own; may grow.
        """
        #: All bytes of both memories, and where the second begins.
        self.both, self.second_begin = both, plan.total_bytes
        second = FlatMemory(plan.total_bytes, {HOST: [(0, plan.total_bytes)]}, own=both[plan.total_bytes :])
        #: The second has the front of variables in ``turned``.
        self.memories = first, second
        self._parameters = parameters
        self._views, self._addresses, self._apart = views, addresses, apart
        pairs = zip(plan.offsets, plan.variables, strict=True)
        own = [second.view(HOST, begin, variable.dtype, variable.shape) for begin, variable in pairs]
        self._backs = own[: len(parameters)]
        self._large = frozenset(n for n, view in enumerate(views) if view.nbytes >= LARGE_BYTES)
        #: The large parameters whose front is the second memory.
        self.turned: set[int] = set()
        #: Their places.
        self._turned_ranges: list[Range] = []
        self._users = {n: storage_users(parameters[n]) for n in self._large}
        #: By shard, slice indexes: those that have arrived, and those of the payload expected last.
        self._arrived: dict[int, frozenset[int]] = {}
        self._expected: dict[int, frozenset[int]] = {}
        self.lay_out(plan)

    def lay_out(self, plan: FlatPlan) -> None:
        """Use the layout after slices have moved between shards. Payloads that arrived but have not landed are
        dropped.
        """
        self._plan = plan
        self._arrived = {}
        of_slices = (span.slice.variable for layout in plan.layouts for span in layout.slices)
        self._slices = Counter(n for n in of_slices if n in self._large)
        self._present = lru_cache(_CACHED_PATTERNS)(self._found_present)
        self._parts = lru_cache(_CACHED_PATTERNS)(self._found_parts)

    def fronts(self, ranges: Iterable[Range]) -> list[memoryview]:
        """The front memory at ``ranges`` of flat memory."""
        return list(self._cut(ranges, back=False))

    def expect(self, shard: int, absent: tuple[int, ...], buffers: bool) -> list[memoryview]:
        """The back memory for a payload of ``shard`` without the slices ``absent``, by index, and perhaps ``buffers``.

        Slices that it overwrites count as not arrived until the payload is complete.
        """
        self._expected[shard] = expected = self._present(shard, absent, buffers)
        if shard in self._arrived:
            self._arrived[shard] -= expected
        return list(self._cut(self._plan.ranges(shard, absent, buffers), back=True))

    def complete(self, shard: int) -> None:
        """Note that the payload expected last from ``shard`` is complete."""
        expected = self._expected[shard]
        before = self._arrived.get(shard)
        self._arrived[shard] = before | expected if before else expected

    def forget(self, shard: int) -> None:
        """Drop what has arrived from ``shard``: newer values are about to be written to the front."""
        self._arrived.pop(shard, None)

    def land(self) -> None:
        """Make all arrived values the front."""
        if not self._arrived:
            return
        found: dict[int, list[Range]] = {}
        for shard, slices in self._arrived.items():
            small, large = self._parts(shard, slices)
            self._copy(self.memories[0], self.memories[1], small)
            for number, places in large:
                found.setdefault(number, []).extend(places)
        self._arrived = {}
        for number, places in found.items():
            if self._may_turn(number, whole=len(places) == self._slices[number]):
                self._turn(number)
            else:
                front, back = self.memories if number not in self.turned else self.memories[::-1]
                self._copy(front, back, places)
        plan = self._plan
        ends = ((plan.offsets[n], aligned(plan.offsets[n] + plan.variables[n].nbytes)) for n in self.turned)
        self._turned_ranges = merge(sorted(ends))

    def _may_turn(self, number: int, *, whole: bool) -> bool:
        return whole and (number in self._apart or storage_users(self._parameters[number]) == self._users[number])

    def _turn(self, number: int) -> None:
        """Exchange front and back of a parameter."""
        self.turned ^= {number}
        views, backs, parameter = self._views, self._backs, self._parameters[number]
        views[number], backs[number] = backs[number], views[number]
        # A parameter that was just given other memory keeps it.
        if number not in self._apart and parameter.data_ptr() == self._addresses[number]:
            parameter.data = views[number]
            self._addresses[number] = parameter.data_ptr()

    @staticmethod
    @torch.no_grad()
    def _copy(target: FlatMemory, source: FlatMemory, ranges: Iterable[Range]) -> None:
        for begin, end in ranges:
            target.host[begin:end].copy_(source.host[begin:end])

    def _cut(self, ranges: Iterable[Range], *, back: bool) -> Iterator[memoryview]:
        """``ranges``, split between the memories that hold each part's front or back."""
        plain, other = (memory.bytes for memory in (self.memories[::-1] if back else self.memories))
        for begin, end in ranges:
            # Start at the last range that begins before: it may reach into this one.
            at = max(0, bisect_right(self._turned_ranges, begin, key=itemgetter(0)) - 1)
            for first, last in overlap(self._turned_ranges[at:], (begin, end)):
                if begin < first:
                    yield plain[begin:first]
                yield other[first:last]
                begin = last
            if begin < end:
                yield plain[begin:end]

    def _found_present(self, shard: int, absent: tuple[int, ...], buffers: bool) -> frozenset[int]:
        missing, slices = frozenset(absent), enumerate(self._plan.layouts[shard].slices)
        return frozenset(n for n, s in slices if n not in missing and (buffers or s.variable.kind is Kind.PARAMETER))

    def _found_parts(self, shard: int, slices: frozenset[int]) -> tuple[list[Range], list[tuple[int, list[Range]]]]:
        """The ranges of slices that are always copied; and the ranges of each large parameter's slices, with the
        parameter.
        """
        variables = [(index, self._plan.layouts[shard].slices[index].slice.variable) for index in sorted(slices)]
        large = [(number, self._plan.values(shard, [index])) for index, number in variables if number in self._large]
        return self._plan.values(shard, [index for index, number in variables if number not in self._large]), large


class BackRegion:
    """A ``ReceiveBuffer`` without its own memory: one shard's parameters arrive in the model's back memory."""

    def __init__(self, memory: DoubleBuffer, shard: int) -> None:
        self._memory = memory
        self._shard = shard

    def place(self, result: StepAnswer) -> list[memoryview]:
        """The memory for the payload of ``result``."""
        return self._memory.expect(self._shard, result.absent, result.with_buffers)

    def complete(self, result: StepAnswer) -> None:
        """Note that the payload of ``result`` has arrived."""
        if result.payload_bytes:
            self._memory.complete(self._shard)
