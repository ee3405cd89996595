"""Two memories that gradients are pushed from in turn, so that the next ones are computed where nothing is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

import torch

from ps_protocol.model.layout import Range
from ps_protocol.wire.shared_memory import SharedMemory
from ps_worker.memory.flat import FlatModel
from ps_worker.memory.plan import FlatPlan
from ps_worker.model.bindings import Bindings
from ps_worker.step.gradients import GradientBuffers
from ps_worker.tables.update import RowUpdate


@dataclass(slots=True)
class _Missed:
    """What one memory has not been told yet, for the training thread uses it."""

    plan: FlatPlan | None = None
    segments: dict[int, SharedMemory] = field(default_factory=dict)


class AlternatingGradients:
    """In the place of GradientBuffers where exchanges overlap and all parameters are on the CPU.

    One memory holds the push that is under way. It belongs to the thread that makes the exchange, as ``place``,
    ``lay_out``, ``has_place``, ``pieces``, ``memory``, ``region``, ``first_nonfinite`` and ``squared_norm`` do; the
    training thread has it between exchanges. ``keep_in_place`` makes gradients views of the other one. A gradient in
    the memory of a push is ``parked``: the user has its values and may write them. A gradient that somebody else holds
    stays the tensor that it is, and is copied.
    """

    #: Of each shard.
    segments = 2

    def __init__(self, plan: FlatPlan, bindings: Bindings) -> None:
        self._memories = tuple(GradientBuffers(plan, bindings, mappable=True) for _ in range(2))
        #: The memory of the last push, and that which gradients are kept in.
        self._pushed = self._kept = 0
        self._missed = [_Missed(), _Missed()]
        self._lock = threading.Lock()

    # -- the training thread

    def keep_in_place(self, *, pushing: bool) -> None:
        """As ``GradientBuffers.keep_in_place``; ``pushing``: the last push may be under way."""
        if pushing and self._kept == self._pushed:
            self._kept = 1 - self._pushed
        memory = self._caught_up(self._kept)
        if memory.may_park:
            memory.keep_unheld_in_place(self._memories[1 - self._kept])

    def collect(self, done: Container[int] = ()) -> tuple[int, ...]:
        """As ``GradientBuffers.collect``. No exchange is under way."""
        if not done:
            kept = self._caught_up(self._kept)
            self._pushed = 1 - self._kept if kept.are_held() else self._kept
        return self._caught_up(self._pushed).collect(done)

    def park(self) -> None:
        """Before the exchange begins: the user has what is pushed in other tensors."""
        self._memories[self._pushed].park()

    def gather(self, number: int) -> None:
        """As ``GradientBuffers.gather``."""
        self._memories[self._pushed].gather(number)

    def collect_buffers(self) -> None:
        """As ``GradientBuffers.collect_buffers``."""
        self._memories[self._pushed].collect_buffers()

    def make_views_again(self) -> None:
        """As ``GradientBuffers.make_views_again``. No exchange is under way."""
        for which in range(2):
            self._caught_up(which).make_views_again()

    def _caught_up(self, which: int) -> GradientBuffers:
        with self._lock:
            missed, self._missed[which] = self._missed[which], _Missed()
        memory = self._memories[which]
        if missed.plan is not None:
            memory.lay_out(missed.plan)
        for shard, segment in missed.segments.items():
            memory.place(shard, segment)
        return memory

    # -- the thread that makes the exchange

    @property
    def segment(self) -> int:
        """Number of the shards' segment that the push is in, where they share memory."""
        return self._pushed + 1

    def place(self, shard: int, *segments: SharedMemory) -> None:
        """As ``GradientBuffers.place``; the second segment is for the other memory."""
        self._memories[self._pushed].place(shard, *segments[self._pushed : self._pushed + 1])
        if segments:
            with self._lock:
                self._missed[1 - self._pushed].segments[shard] = segments[1 - self._pushed]

    def lay_out(self, plan: FlatPlan) -> None:
        """As ``GradientBuffers.lay_out``."""
        self._memories[self._pushed].lay_out(plan)
        with self._lock:
            self._missed[1 - self._pushed] = _Missed(plan)

    def has_place(self, shard: int) -> bool:
        """Whether there is memory for this shard."""
        return self._memories[self._pushed].has_place(shard)

    def pieces(self, shard: int, ranges: Sequence[Range]) -> list[memoryview]:
        """Bytes of the shard's region, to be sent."""
        return self._memories[self._pushed].pieces(shard, ranges)

    def memory(self, shard: int) -> memoryview:
        """All bytes of the shard's region."""
        return self._memories[self._pushed].memory(shard)

    def region(self, shard: int) -> torch.Tensor:
        """All bytes of the shard's region, uint8, as collected last."""
        return self._memories[self._pushed].region(shard)

    def bring(self, shard: int, span: Range) -> Callable[[], None]:
        """As ``GradientBuffers.bring``."""
        return self._memories[self._pushed].bring(shard, span)

    def first_nonfinite(self, absent: tuple[int, ...]) -> str | None:
        """As ``GradientBuffers.first_nonfinite``."""
        return self._memories[self._pushed].first_nonfinite(absent)

    def squared_norm(self, absent: tuple[int, ...], rows: RowUpdate | None = None) -> float:
        """As ``GradientBuffers.squared_norm``."""
        return self._memories[self._pushed].squared_norm(absent, rows)


Gradients = GradientBuffers | AlternatingGradients
"""What pushes are sent from."""


def gradients_of(flat: FlatModel, bindings: Bindings, *, changed: bool) -> Gradients:
    """Two memories where parameters have two. ``changed``: shards change gradients, as when they clip them."""
    return (AlternatingGradients if flat.double and not changed else GradientBuffers)(flat.plan, bindings)
