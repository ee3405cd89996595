"""Makes all workers evaluate the same parameters, also where scripts have set values since the last step."""

from __future__ import annotations

import enum
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ps_protocol.errors import InvalidRequest
from ps_protocol.logs import EventLogger
from ps_protocol.records import from_plain, to_plain
from ps_worker.session.session import Session
from ps_worker.step.remote_model import RemoteModel

logger = EventLogger("ps_worker")

Gather = Callable[[Any], Mapping[int, Any]]
"""A collective call: returns the values of all workers, by rank."""


class Choice(enum.Enum):
    """Which parameters workers evaluate."""

    #: Those of the job: no worker has set any.
    NEWEST = "newest"
    #: Each worker its own, which it has set.
    OWN = "own"
    #: Those of the lowest rank, which become the job's.
    LOWEST = "lowest"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class ParameterReport:
    """What a worker reports of its parameters."""

    #: Name of a variable that was set; empty: none was.
    variable: str = ""
    #: Digests of the values of all parameters, and of all buffers; empty where none was set.
    parameters: str = ""
    buffers: str = ""
    has_stepped: bool = False
    #: All workers step together, so that values set between steps lose no update.
    in_lockstep: bool = False
    #: Differs from that of an earlier process of this rank.
    process: str = ""


def choose(reports: Mapping[int, ParameterReport], *, in_training: bool) -> Choice:
    """Return which parameters are evaluated, the same choice on every worker.

    ``in_training``: steps follow. Values that callbacks set for an evaluation and take back after it do not become the
    job's then.
    """
    ranks = sorted(reports)
    setting = [rank for rank in ranks if reports[rank].variable]
    lowest = reports[ranks[0]]
    if not setting:
        return Choice.NEWEST
    if setting == ranks and (in_training or differing(reports) is None):
        return Choice.OWN
    if not in_training or lowest.in_lockstep or not any(each.has_stepped for each in reports.values()):
        return Choice.LOWEST
    return Choice.REFUSED


def differing(reports: Mapping[int, ParameterReport], *, buffers: bool = True) -> int | None:
    """Return a worker whose values differ from those of the lowest rank; None: all are equal."""
    lowest = reports[min(reports)]
    for rank, each in reports.items():
        if each.parameters != lowest.parameters or (buffers and each.buffers != lowest.buffers):
            return rank
    return None


class CommonValues:
    """One per trainer, used in the training thread. All workers make the same calls in the same order."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._process = uuid.uuid4().hex
        self._warned = False

    def before_evaluation(
        self, models: Sequence[RemoteModel], gather: Gather, *, in_training: bool
    ) -> Mapping[int, ParameterReport]:
        """Bring the parameters that all workers evaluate into ``models``, and return the reports of all workers, by
        rank.

        If no worker has set values, these are the newest parameters; if all have set equal ones, these; else those of
        the lowest rank. In training, where updates of other workers would be lost, raises InvalidRequest instead.
        Raises PsError.
        """
        reports = self._exchange_reports(models, gather, with_buffers=not in_training)
        choice = choose(reports, in_training=in_training)
        if choice is Choice.NEWEST:
            for model in models:
                model.pull()
        elif choice is Choice.LOWEST:
            self._take_lowest(models, gather, reports, "the evaluation")
        elif choice is Choice.REFUSED:
            raise self._refusal(reports)
        elif in_training and (other := differing(reports, buffers=False)) is not None and not self._warned:
            self._warned = True
            logger.warning(
                "model.options",
                "workers evaluate different parameters: '%s' was set on all of them, and on rank %d not as on the "
                "lowest rank; each evaluates its own",
                reports[other].variable,
                other,
            )
        return reports

    def settle(self, models: Sequence[RemoteModel], gather: Gather, place: str) -> None:
        """Before or after a training: make what the lowest rank has set the job's, and take the job's values on all
        workers.

        No worker makes a step until all have called this. ``place`` names the moment in the warning about replaced
        values. Raises PsError.
        """
        reports = self._exchange_reports(models, gather, with_buffers=True)
        if any(each.variable for each in reports.values()):
            self._take_lowest(models, gather, reports, place)
        else:
            for model in models:
                model.pull()

    def _exchange_reports(
        self, models: Sequence[RemoteModel], gather: Gather, *, with_buffers: bool
    ) -> dict[int, ParameterReport]:
        found = [name for model in models for name in model.set_values(with_buffers=with_buffers)]
        digests = [model.digests() for model in models] if found else []
        own = ParameterReport(
            found[0] if found else "",
            " ".join(parameters for parameters, _ in digests),
            " ".join(buffers for _, buffers in digests),
            any(model.has_stepped for model in models),
            self._session.consistency.in_lockstep,
            self._process,
        )
        return {rank: _report_of(value, rank) for rank, value in gather(to_plain(own)).items()}

    def _take_lowest(
        self, models: Sequence[RemoteModel], gather: Gather, reports: Mapping[int, ParameterReport], place: str
    ) -> None:
        rank = self._session.rank
        # What others made of an exchange that an earlier process of this rank took part in has been assigned.
        took_part = rank in reports and reports[rank].process == self._process
        for model in models:
            model.offer_values(assigns=took_part and rank == min(reports))
        gather(None)
        for model in models:
            model.pull(place)

    def _refusal(self, reports: Mapping[int, ParameterReport]) -> InvalidRequest:
        setting = [rank for rank, each in reports.items() if each.variable]
        variable = reports[setting[0]].variable
        return InvalidRequest(
            f"values of '{variable}' were set before an evaluation, and not on all workers: updates of other workers "
            "would be lost",
            variable=variable,
            expected="set on all ranks, or on none",
            actual="set on rank " + ", ".join(map(str, setting)),
            remedy="set values for an evaluation on all ranks, and take them back after it on all",
        )


def _report_of(value: Any, rank: int) -> ParameterReport:
    """Return the report of worker ``rank``. Raises InvalidRequest where its script made another call."""
    try:
        return from_plain(ParameterReport, value)
    except (LookupError, TypeError) as error:
        raise InvalidRequest(
            "workers make different collective calls at the same place of their scripts",
            expected="the beginning of an evaluation, or the end of a training, as this worker",
            actual=f"{value!r:.80} by worker {rank}",
            remedy="have every worker make the same calls of its trainer in the same order",
        ) from error
