"""Handles values that the user sets after ``cluster.optimizer(...)``: assigns them to the shards, or refuses them.

With one worker, and before training, they are the cluster's next values. In sync the worker of the lowest rank sends
them ahead of its push, so they apply before its step; the other workers must have set the same values. Where updates
of other workers would be lost, the intention is not known: that is an error.
"""

from __future__ import annotations

import enum
import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ps_protocol import times as shared
from ps_protocol.cluster.exchange import ExchangeKey
from ps_protocol.cluster.model_status import ModelStatus
from ps_protocol.errors import InvalidRequest, NotReady, PsError
from ps_protocol.logs import EventLogger
from ps_protocol.model.spec import Consistency
from ps_protocol.retry import OTHERS
from ps_worker import times
from ps_worker.memory.flat import FlatModel
from ps_worker.session.session import Session
from ps_worker.step.pipeline import StepPipeline
from ps_worker.step.summary import Writes

logger = EventLogger("ps_worker")


_REMEDY = (
    "set values before cluster.optimizer(...), or call optimizer.assign() on one worker and then cluster.barrier(); "
    "to take the cluster's values back, as after an evaluation with others, call optimizer.pull(); "
    'writes="ignore" drops what is set'
)


def digest(tensors: Sequence[torch.Tensor]) -> str:
    """Of the bytes of all ``tensors``: the same for the same bytes."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


class WriteAction(enum.Enum):
    """How values that were set are handled."""

    #: They become the cluster's.
    ASSIGN = "assign"
    #: The worker of the lowest rank must have set them too; it sends them.
    AGREE = "agree"
    #: The cluster's values are kept: this worker joined a job that has been trained.
    YIELD = "yield"
    IGNORE = "ignore"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class WriterState:
    """The state of a worker when values are found that its user has set."""

    consistency: Consistency
    #: Live workers, including this one.
    workers: int
    #: This one is the lowest rank.
    is_lowest: bool
    #: This worker has made a step.
    has_stepped: bool
    #: The model had been trained when this worker came.
    joined_running: bool
    #: An exchange runs beside the computation: its parameters are not those that the user changed.
    overlaps: bool


def action_of(writes: Writes, state: WriterState) -> WriteAction:
    """How values that were set are handled, by the user's policy and the worker's state."""
    if writes is Writes.IGNORE:
        return WriteAction.IGNORE
    if writes is Writes.REFUSE:
        return WriteAction.REFUSE
    if not state.has_stepped and state.joined_running:
        return WriteAction.YIELD
    if state.has_stepped and state.overlaps:
        return WriteAction.REFUSE
    if state.workers == 1:
        return WriteAction.ASSIGN
    if not state.has_stepped or state.consistency.in_lockstep:
        return WriteAction.ASSIGN if state.is_lowest else WriteAction.AGREE
    return WriteAction.REFUSE


class AssignedValues:
    """Used by one optimizer, in the training thread, while no exchange is under way."""

    def __init__(self, session: Session, pipeline: StepPipeline, flat: FlatModel, writes: Writes) -> None:
        self._session = session
        self._pipeline = pipeline
        self._flat = flat
        self._writes = writes
        #: This worker has made a step.
        self.has_stepped = False
        #: Values that this worker had set when it came to a barrier, by number.
        self._at_barrier: dict[int, torch.Tensor] = {}

    def before_step(self, written: tuple[int, ...], *, overlaps: bool = False) -> None:
        """Decide about the variables ``written`` by the user since the last parameters came, by number.

        Raises InvalidRequest where the user's intention cannot be known, NotReady when the worker of the lowest rank
        does not come, and PsError.
        """
        match self._action(overlaps):
            case WriteAction.ASSIGN:
                self._assign_after_start(written)
            case WriteAction.AGREE:
                self._agree(written)
            case WriteAction.YIELD:
                self._yield(written)
                self._pipeline.pull()
            case WriteAction.REFUSE if self._writes is Writes.REFUSE or not self._flat.unsure.issuperset(written):
                raise self._refusal(written)
            case WriteAction.REFUSE:
                self._doubt(written)
            case WriteAction.IGNORE:
                # The answer to a step has the values that the step changes; others would stay as they were set.
                if any(self._flat.is_untrained(number) for number in written):
                    self._pipeline.pull()

    def too_late(self, written: tuple[int, ...]) -> None:
        """The variables ``written`` have been replaced meanwhile: raises InvalidRequest, unless that is wanted."""
        if self._writes is not Writes.IGNORE:
            raise self._refusal(written, "an exchange overlaps, which brings parameters that are not based on them")

    def set_now(self, *, with_buffers: bool) -> tuple[int, ...]:
        """Numbers of the variables that were set since the last parameters came, and that are not to be dropped.

        ``with_buffers``: also of the buffers that have changed since. Raises InvalidRequest by the policy "refuse".
        """
        written = self._flat.written()
        if written and self._writes is Writes.REFUSE:
            raise self._refusal(written)
        if self._writes is Writes.IGNORE:
            return ()
        if written and self._action(overlaps=False) is WriteAction.YIELD:
            self._yield(written)
            return ()
        return (*written, *(self._flat.changed_buffers() if with_buffers else ()))

    def before_barrier(self, *, with_buffers: bool, assigns: bool | None = None) -> None:
        """Values set by the worker of the lowest rank go to the shards; those set by others are replaced.

        ``with_buffers``: so do its buffers where they have changed since its last step. ``assigns``: this is the worker
        whose values go; None: the lowest live rank is. Raises InvalidRequest, PsError.
        """
        written = self._flat.written()
        if self._writes is Writes.REFUSE and written:
            raise self._refusal(written)
        if self._writes is Writes.IGNORE:
            return
        if written and self._action(overlaps=False) is WriteAction.YIELD:
            self._yield(written)
            self._pipeline.pull()
            return
        buffers = self._flat.changed_buffers() if with_buffers or written else ()
        if self._session.initialiser() if assigns is None else assigns:
            if written or buffers:
                self._assign_after_start((*written, *buffers))
        elif not self._at_barrier:
            self._at_barrier = {n: self._flat.values_of(n).clone() for n in written}

    def after_barrier(self, place: str = "cluster.barrier()") -> None:
        """The model has the cluster's parameters. Warns where they replace values that this worker had set.

        ``place``: what they were set before.
        """
        kept, self._at_barrier = self._at_barrier, {}
        lost = [n for n, values in kept.items() if not torch.equal(values, self._flat.values_of(n))]
        if lost:
            self._warn_replaced(lost, place)

    def at_end(self) -> None:
        """At a clean end: values set last become the cluster's where that is possible; else warns.

        A worker that has set values the shards do not have waits for the others for a moment: where all have set some
        and come to their end, no step is lost, and those of the lowest rank become the cluster's in every mode.
        """
        written = self._flat.written()
        if not written or self._writes is Writes.IGNORE:
            return
        action = self._action(overlaps=False)
        if action is WriteAction.ASSIGN:
            sent = self._sent_at_end(written)
            self._assign_after_start(written)
            # A worker that comes to its end when this one has left would be the lowest, and assign its own.
            self._wait_for_others_ends(written, sent)
            return
        if self._writes is Writes.REFUSE or action is WriteAction.YIELD:
            self._warn_not_sent(written)
            return
        if not self._differences(written):
            return
        own = self._digest(written)
        sent = self._wait_for_others_ends(written, self._sent_at_end(written))
        lowest = min(sent, default=None)
        if lowest == self._session.rank or (lowest is None and self._action(overlaps=False) is WriteAction.ASSIGN):
            self._assign_after_start(written)
        elif lowest is not None:
            if sent[lowest] != own:
                self._warn_not_kept(written)
            elif lowest not in self._session.workers and self._differences(written):
                # It has left without it, since nobody else had come to the end in time.
                self.assign(written)
        elif action is WriteAction.AGREE:
            if found := self._differences(written):
                self._warn_not_kept(found)
        else:
            self._warn_not_sent(written)

    def _wait_for_others_ends(self, written: tuple[int, ...], sent: Mapping[int, str]) -> Mapping[int, str]:
        """``_sent_at_end``, again and again for a moment, while it is empty and other workers live."""
        deadline = time.monotonic() + times.LAST_VALUES_SECONDS
        while not sent and len(self._session.workers) > 1 and time.monotonic() < deadline:
            time.sleep(OTHERS.longest_seconds)
            sent = self._sent_at_end(written)
        return sent

    def _sent_at_end(self, written: tuple[int, ...]) -> Mapping[int, str]:
        """What workers that have come to their end have set, by rank; empty until all live workers have sent theirs."""
        key = ExchangeKey(f"set at the end of {self._pipeline.name}", self._session.phase)
        try:
            state = self._session.try_exchange(key, self._digest(written).encode())
        except PsError as error:
            logger.debug("what other workers have set at their end is not known: %s", error)
            return {}
        return {rank: sent.decode(errors="replace") for rank, sent in state.payloads.items()} if state.complete else {}

    def _digest(self, written: tuple[int, ...]) -> str:
        return f"{written}{digest([self._flat.values_of(number) for number in written])}"

    def _warn_not_sent(self, written: tuple[int, ...]) -> None:
        logger.warning(
            "model.options",
            "model '%s': '%s' was set after the last step: this process has it, the shards have not; "
            "call cluster.barrier() before the end",
            self._pipeline.name,
            self._name(written),
        )

    def _assign_after_start(self, written: Iterable[int]) -> None:
        """``assign``; before the first step only when all workers have what they begin with.

        A change that all of them make alike, as ``weight *= 0.5``, would else be made twice on one that begins with
        values that are changed already. Waits for the workers that live now; one that leaves, or comes later, is not
        waited for, and begins with the values that the shards have then.
        """
        if not (self.has_stepped or self._pipeline.joined_running):
            self._wait_for_others_first_values()
        self.assign(written)

    def _wait_for_others_first_values(self) -> None:
        bounded = self._session.consistency.mode.bounded
        deadline = time.monotonic() + (shared.LONG_PATIENCE_SECONDS if bounded else shared.PATIENCE_SECONDS)
        others, pause = set(self._session.workers) - {self._session.rank}, 0.0
        while others:
            statuses = self._pipeline.on_each(lambda stream: stream.values.status())
            having = [{clock.rank for clock in status.clocks if clock.has_values} for status in statuses]
            live = set(self._session.workers)
            others = {rank for rank in others & live if not all(rank in known for known in having)}
            if others and time.monotonic() > deadline:
                logger.warning(
                    "model.options",
                    "model '%s': values are set here, and worker %d has not called cluster.optimizer(...) for it in "
                    "time: it begins with the values that are set",
                    self._pipeline.name,
                    min(others),
                )
                return
            if others:
                self._session.wait_hint(
                    f"waiting for worker {min(others)} to have the first values of model '{self._pipeline.name}', "
                    "before values that were set here are assigned"
                )
                time.sleep(pause := OTHERS.after(pause))

    def assign(self, variables: Iterable[int]) -> None:
        """Make this worker's values of ``variables``, by number, the cluster's. Raises PsError."""
        chosen = frozenset(variables)
        self._flat.collect_values()
        # Ranks that have not stepped compare with the checksums; later, in sync, they compare the values themselves.
        checksums = not self.has_stepped
        self._pipeline.on_each(lambda stream: stream.values.assign(chosen, checksums=checksums))
        self._flat.mark_published()

    def _doubt(self, written: tuple[int, ...]) -> None:
        """Take the cluster's values; from now on it is known whether values of these variables were put back."""
        logger.warning(
            "model.options",
            "model '%s': '%s' was written to since the last step, and the values that were compared are as before: "
            "they count as put back, and a part that was set to other values is dropped; from now on all are compared",
            self._pipeline.name,
            self._name(written),
        )
        self._flat.watch(written)
        if any(self._flat.is_untrained(number) for number in written):
            self._pipeline.pull()

    def _yield(self, written: tuple[int, ...]) -> None:
        logger.warning(
            "model.options",
            "model '%s' has been trained already: '%s' and whatever else was set before the first step is "
            "replaced by the cluster's values; call optimizer.assign() to set them",
            self._pipeline.name,
            self._name(written),
        )

    def _warn_replaced(self, lost: Sequence[int], before: str) -> None:
        logger.warning(
            "model.options",
            "model '%s': '%s'%s was set on rank %d before %s, and not so on the lowest rank, whose "
            "values hold; set them on all ranks, or on the lowest",
            self._pipeline.name,
            self._name(lost),
            f" and {len(lost) - 1} more" if len(lost) > 1 else "",
            self._session.rank,
            before,
        )

    def _warn_not_kept(self, written: Sequence[int]) -> None:
        """Warn of values set at the end that differ from those of the lowest rank, which the cluster keeps."""
        logger.warning(
            "model.options",
            "model '%s': '%s' was set on rank %d after its last step and is not the cluster's: what the lowest "
            "rank sets counts; call cluster.barrier() before the end",
            self._pipeline.name,
            self._name(written),
            self._session.rank,
        )

    def _action(self, overlaps: bool) -> WriteAction:
        ranks = self._session.workers
        return action_of(
            self._writes,
            WriterState(
                consistency=self._session.consistency,
                workers=len(ranks),
                is_lowest=self._session.initialiser(),
                has_stepped=self.has_stepped,
                joined_running=self._pipeline.joined_running,
                overlaps=overlaps,
            ),
        )

    def _agree(self, written: tuple[int, ...]) -> None:
        """Wait until the worker of the lowest rank has set ``written`` too. Raises InvalidRequest where it has not."""
        deadline = time.monotonic() + shared.LONG_PATIENCE_SECONDS
        pause = 0.0
        # The lowest rank may push for others of its host, and would wait for this worker.
        phase, clock = self._pipeline.next_position
        self._pipeline.away((phase, clock + 1))
        while not self._session.initialiser():
            # The lowest rank waits until each shard knows that this worker has the first values.
            self._pipeline.following_moves(self._pipeline.ensure_open)
            statuses = self._pipeline.on_each(lambda stream: (stream.values.status(), stream.values.holds(written)))
            came = all(self._lowest_came(status) for status, _ in statuses)
            if self._session.consistency.mode.collects:
                if came:
                    self._compare(written)
                    return
            elif all(status.assigned for status, holds in statuses if holds):
                self._take_assigned(written)
                return
            elif came:
                raise self._refusal(written, "the worker of the lowest rank has not set it")
            if time.monotonic() > deadline:
                raise NotReady(
                    f"'{self._name(written)}' was set here, and the worker of the lowest rank has not set it in time",
                    remedy=_REMEDY,
                )
            self._session.wait_hint(f"waiting for the lowest rank to set '{self._name(written)}' too")
            time.sleep(pause := OTHERS.after(pause))
        # The lowest rank has left: this one is it now.
        self._assign_after_start(written)

    def _take_assigned(self, written: tuple[int, ...]) -> None:
        """Take the cluster's values, which may have been trained since; warn where other values were set here."""
        self._flat.collect_values()
        chosen = frozenset(written)
        otherwise = {
            n for found in self._pipeline.on_each(lambda stream: stream.values.not_assigned(chosen)) for n in found
        }
        self._pipeline.pull()
        if otherwise:
            self._warn_replaced(sorted(otherwise), "its first step")

    def _lowest_came(self, status: ModelStatus) -> bool:
        """Whether the lowest rank has pushed for this worker's next step: it sends values that it set before that."""
        lowest = min(self._session.workers)
        return any(
            clock.rank == lowest and (clock.phase, clock.clock) >= self._pipeline.next_position
            for clock in status.clocks
        )

    def _differences(self, written: tuple[int, ...]) -> list[int]:
        """By shard, the first of ``written`` whose values there are not this worker's."""
        self._flat.collect_values()
        chosen = frozenset(written)
        return [n for n in self._pipeline.on_each(lambda s: s.values.first_difference(chosen)) if n is not None]

    def _compare(self, written: tuple[int, ...]) -> None:
        if found := self._differences(written):
            raise self._refusal(
                (min(found),),
                "the worker of the lowest rank has set other values, or none",
                remedy=f"{_REMEDY}; max_norm of an embedding sets the rows of a rank's own batch: leave it out, and "
                "renormalise all rows after each step on all ranks",
            )

    def _refusal(self, written: tuple[int, ...], why: str = "", remedy: str = _REMEDY) -> InvalidRequest:
        if not why and self._writes is Writes.REFUSE:
            why = 'writes="refuse"'
        mode = self._session.consistency
        if not why and len(self._session.workers) == 1:
            why = "an exchange overlaps, which brings parameters that are not based on them"
        why = why or f"in {mode} with {len(self._session.workers)} workers updates of other workers may be lost"
        return InvalidRequest(
            f"values of '{self._name(written)}' were set after cluster.optimizer(...): {why}",
            variable=self._name(written),
            remedy=remedy,
        )

    def _name(self, numbers: Iterable[int]) -> str:
        return self._flat.plan.variables[min(numbers)].name
