"""Has all workers evaluate the same parameters, where some have set values since the last step: what is set is kept."""

from __future__ import annotations

import enum
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ps_protocol.errors import InvalidRequest
from ps_protocol.logs import EventLogger
from ps_worker.session.session import Session
from ps_worker.step.remote_model import RemoteModel

logger = EventLogger("ps_worker")

Gather = Callable[[Any], Mapping[int, Any]]
"""A collective call: gives what each worker gave, by rank."""


class Choice(enum.Enum):
    """The parameters that workers evaluate."""

    #: The cluster's: nobody has set any.
    NEWEST = "newest"
    #: Each its own, as it has set them.
    OWN = "own"
    #: Those of the lowest rank, which become the cluster's.
    LOWEST = "lowest"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Told:
    """What a worker tells the others of its parameters."""

    #: A variable that was set; empty: none.
    variable: str = ""
    #: Of the values of all parameters, and of all buffers, where one was set.
    parameters: str = ""
    buffers: str = ""
    has_stepped: bool = False
    #: In this worker's mode what is set between steps counts, since all workers step together.
    in_lockstep: bool = False
    #: Tells a process from an earlier one of its rank.
    process: str = ""


def choose(told: Mapping[int, Told], *, in_training: bool) -> Choice:
    """The parameters that are evaluated, the same choice on every worker.

    ``in_training``: steps follow. Values that callbacks put in the place of the trained ones for an evaluation, and
    take out again, are not the cluster's then.
    """
    ranks = sorted(told)
    setting = [rank for rank in ranks if told[rank].variable]
    lowest = told[ranks[0]]
    if not setting:
        return Choice.NEWEST
    if setting == ranks and (in_training or differing(told) is None):
        return Choice.OWN
    if not in_training or lowest.in_lockstep or not any(each.has_stepped for each in told.values()):
        return Choice.LOWEST
    return Choice.REFUSED


def differing(told: Mapping[int, Told], *, buffers: bool = True) -> int | None:
    """A worker whose values are not those of the lowest rank; None: all are the same."""
    lowest = told[min(told)]
    for rank, each in told.items():
        if each.parameters != lowest.parameters or (buffers and each.buffers != lowest.buffers):
            return rank
    return None


class CommonValues:
    """One for a trainer, in the training thread. All workers make its calls at the same places of their scripts."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._process = uuid.uuid4().hex
        self._warned = False

    def before_evaluation(
        self, models: Sequence[RemoteModel], gather: Gather, *, in_training: bool
    ) -> Mapping[int, Told]:
        """Bring the parameters that all workers evaluate into ``models``; what each worker told, by rank.

        Nothing set: the newest. Set alike on all workers: as they are. Else those of the lowest rank; in training,
        where updates of other workers would be lost, raises InvalidRequest. Raises PsError.
        """
        told = self._tell(models, gather, with_buffers=not in_training)
        choice = choose(told, in_training=in_training)
        if choice is Choice.NEWEST:
            for model in models:
                model.pull()
        elif choice is Choice.LOWEST:
            self._take_lowest(models, gather, told, "the evaluation")
        elif choice is Choice.REFUSED:
            raise self._refusal(told)
        elif in_training and (other := differing(told, buffers=False)) is not None and not self._warned:
            self._warned = True
            logger.warning(
                "model.options",
                "workers evaluate different parameters: '%s' was set on all of them, and on rank %d not as on the "
                "lowest rank; each evaluates its own",
                told[other].variable,
                other,
            )
        return told

    def settle(self, models: Sequence[RemoteModel], gather: Gather, place: str) -> None:
        """Before or after a training: what the lowest rank has set becomes the cluster's, and all take the cluster's.

        No worker makes a step until all have come here. ``place``: what a warning says of values that are replaced.
        Raises PsError.
        """
        told = self._tell(models, gather, with_buffers=True)
        if any(each.variable for each in told.values()):
            self._take_lowest(models, gather, told, place)
        else:
            for model in models:
                model.pull()

    def _tell(self, models: Sequence[RemoteModel], gather: Gather, *, with_buffers: bool) -> dict[int, Told]:
        found = [name for model in models for name in model.set_values(with_buffers=with_buffers)]
        digests = [model.digests() for model in models] if found else []
        own = Told(
            found[0] if found else "",
            " ".join(parameters for parameters, _ in digests),
            " ".join(buffers for _, buffers in digests),
            any(model.has_stepped for model in models),
            self._session.consistency.in_lockstep,
            self._process,
        )
        return {rank: _told(value, rank) for rank, value in gather(asdict(own)).items()}

    def _take_lowest(self, models: Sequence[RemoteModel], gather: Gather, told: Mapping[int, Told], place: str) -> None:
        rank = self._session.rank
        # What others made of an exchange that an earlier process of this rank took part in has been assigned.
        took_part = rank in told and told[rank].process == self._process
        for model in models:
            model.offer_values(assigns=took_part and rank == min(told))
        gather(None)
        for model in models:
            model.pull(place)

    def _refusal(self, told: Mapping[int, Told]) -> InvalidRequest:
        setting = [rank for rank, each in told.items() if each.variable]
        variable = told[setting[0]].variable
        return InvalidRequest(
            f"values of '{variable}' were set before an evaluation, and not on all workers: updates of other workers "
            "would be lost",
            variable=variable,
            expected="set on all ranks, or on none",
            actual="set on rank " + ", ".join(map(str, setting)),
            remedy="set values for an evaluation on all ranks, and take them back after it on all",
        )


def _told(value: Any, rank: int) -> Told:
    """What worker ``rank`` gave. Raises InvalidRequest where its script made another call."""
    try:
        told = Told(**value)
    except TypeError:
        told = None
    if told is None or any(type(getattr(told, each)) is not type(getattr(Told(), each)) for each in Told.__slots__):
        raise InvalidRequest(
            "workers make different collective calls at the same place of their scripts",
            expected="the beginning of an evaluation, or the end of a training, as this worker",
            actual=f"{value!r:.80} by worker {rank}",
            remedy="have every worker make the same calls of its trainer in the same order",
        )
    return told
