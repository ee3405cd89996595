"""What goes on while the training thread computes: one exchange with the shards, and gradients sent in buckets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial

import torch

from ps_protocol.interruptible import result_of
from ps_protocol.logs import EventLogger
from ps_protocol.model.layout import Range
from ps_protocol.model.spec import Kind
from ps_worker.memory.plan import FlatPlan
from ps_worker.step.gradients import Gradients
from ps_worker.step.pipeline import StepPipeline
from ps_worker.step.summary import StepSummary


class Overlap:
    """Used by the training thread. Between ``begin`` and ``finish`` a thread of its own uses the pipeline."""

    def __init__(self, pipeline: StepPipeline) -> None:
        self._pipeline = pipeline
        self._thread = ThreadPoolExecutor(1, "overlap")
        self._under_way: Future[StepSummary] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether an exchange is under way. From any thread."""
        return (under_way := self._under_way) is not None and not under_way.done()

    @property
    def is_pending(self) -> bool:
        """Whether an exchange has begun that ``finish`` has not ended."""
        return self._under_way is not None

    def begin(self, exchange: Callable[[], StepSummary]) -> None:
        """Start one exchange; the one before must have been finished."""
        self._under_way = self._thread.submit(exchange)

    def finish(self) -> StepSummary | None:
        """The result of the exchange under way; None: there is none. Raises what the exchange raised.

        Ctrl-C ends the exchange; its push may or may not have been applied.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return None
        try:
            summary: StepSummary = result_of(under_way)
            return summary
        except BaseException:
            if not under_way.done():
                self._abandon(under_way)
            raise

    def close(self) -> None:
        """End the exchange under way; its result is dropped."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self._abandon(under_way)
        self._thread.shutdown()

    def _abandon(self, under_way: Future[StepSummary]) -> None:
        self._pipeline.interrupt()
        wait([under_way])
        under_way.exception()
        self._pipeline.resume()


logger = EventLogger("ps_worker")

BUCKET_BYTES = 4 << 20
"""Large compared with the cost of a message, small enough that the first bucket is full early in backward."""


@dataclass(slots=True)
class GradientBucket:
    """Adjacent slices in one arena of one shard."""

    shard: int
    begin: int
    end: int
    #: Numbers of the variables that have a slice in it.
    members: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    sent: bool = False


class GradientBuckets:
    """Hooks into backward; ``collect`` is called by the training thread when it is done.

    A gradient is taken when it has been accumulated as often as in the step before, so accumulation over several
    backwards sends it once. Later changes (clipping, unscaling) raise its version, and the push sends it again. When
    most gradients change later, no more are sent ahead. The shards therefore always apply the gradients that ``step``
    finds.
    """

    def __init__(
        self, plan: FlatPlan, parameters: Sequence[torch.Tensor], gradients: Gradients, pipeline: StepPipeline
    ) -> None:
        self._parameters = parameters
        self._gradients = gradients
        self._pipeline = pipeline
        # Backward runs in a thread per device.
        self._lock = threading.Lock()
        self._cut(plan)
        self._fired = [0] * len(parameters)
        self._expected = [1] * len(parameters)
        #: The gradients taken, by variable, and their versions then.
        self._taken: dict[int, tuple[torch.Tensor, int]] = {}
        self._off = False
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._on_gradient, number))  # type: ignore[no-untyped-call]
            for number, p in enumerate(parameters)
            if p.requires_grad
        ]
        self._begin()

    def lay_out(self, plan: FlatPlan) -> None:
        """Slices have moved between shards; what has been sent ahead is lost."""
        self._cut(plan)
        self._begin()

    def _cut(self, plan: FlatPlan) -> None:
        self._shards = len(plan.layouts)
        self._buckets = _cut(plan, [p.requires_grad for p in self._parameters])
        numbers = range(len(self._parameters))
        self._of: list[list[GradientBucket]] = [[b for b in self._buckets if n in b.members] for n in numbers]

    def collect(self) -> tuple[set[int], list[list[Range]]]:
        """The variables whose gradients have been taken, and per shard the ranges that have been sent.

        Begins the next step.
        """
        valid = {
            n for n, (g, version) in self._taken.items() if self._parameters[n].grad is g and g._version == version
        }
        staged: list[list[Range]] = [[] for _ in range(self._shards)]
        for bucket in self._buckets:
            if bucket.sent and bucket.members <= valid:
                staged[bucket.shard].append((bucket.begin, bucket.end))
        # A gradient that another backward has added to is expected one backward later in the next step.
        final = [n for n in self._taken if self._fired[n] == self._expected[n]]
        if len(valid) < len(final) / 2:
            logger.info("model.options", "gradients change after backward: they are not sent ahead any more")
            self._off = True
        self._expected = [fired or expected for fired, expected in zip(self._fired, self._expected, strict=True)]
        self._begin()
        return valid, staged

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self) -> None:
        self._fired = [0] * len(self._parameters)
        self._taken = {}
        for bucket in self._buckets:
            bucket.waiting, bucket.sent = set(bucket.members), False

    def _on_gradient(self, number: int, parameter: torch.Tensor) -> None:
        with self._lock:
            self._fired[number] += 1
            grad = parameter.grad
            if self._off or grad is None or grad.is_sparse or self._fired[number] != self._expected[number]:
                return
            if not self._pipeline.may_stage():
                return
            self._gradients.pushed.gather(number)
            self._taken[number] = grad, grad._version
            for bucket in self._of[number]:
                bucket.waiting.discard(number)
                if not bucket.waiting:
                    bucket.sent = self._pipeline.stage(bucket.shard, (bucket.begin, bucket.end))


def _cut(plan: FlatPlan, wanted: Sequence[bool]) -> list[GradientBucket]:
    """Buckets of neighbouring slices; they end at arenas' ends and at variables that get no gradients."""
    buckets: list[GradientBucket] = []
    for shard, layout in enumerate(plan.layouts):
        arena, open_bucket = -1, None
        for span in layout.slices:
            if span.variable.kind is not Kind.PARAMETER or not wanted[span.slice.variable]:
                open_bucket = None
                continue
            if open_bucket is None or span.arena != arena or span.end - open_bucket.begin > BUCKET_BYTES:
                open_bucket = GradientBucket(shard, span.begin, span.padded_end)
                buckets.append(open_bucket)
            arena, open_bucket.end = span.arena, span.padded_end
            open_bucket.members.add(span.slice.variable)
    return [bucket for bucket in buckets if bucket.begin < bucket.end]
