"""The answer to a push, without parameters: what was decided about it, and what became of it."""

from __future__ import annotations

from ps_protocol.cluster.answers import StepAnswer
from ps_server.consistency import PushInfo, Verdict
from ps_server.shard.step.model import ShardModel
from ps_server.shard.step.push import IncomingPush

OUTCOMES = {
    Verdict.APPLY: "APPLIED",
    Verdict.HOLD: "APPLIED",
    Verdict.DUPLICATE: "DUPLICATE",
    Verdict.LATE: "LATE",
    Verdict.STALE: "STALE",
    Verdict.SKIP: "SKIPPED",
}


def answer_to(push: IncomingPush, model: ShardModel) -> StepAnswer:
    """The answer to one push, without parameters."""
    info, decision, tracker = push.info, push.decision, model.tracker
    answer = StepAnswer(info.sequence, "REFUSED", tracker.version, clock=info.position.clock, error=push.error)
    if decision is None:
        return answer
    answer.outcome = OUTCOMES[decision.verdict]
    answer.staleness = model.staleness.get(info.worker.rank, 0)
    if decision.verdict is Verdict.HOLD and not tracker.may_pull(info.position):
        answer.outcome = "PENDING"
    if decision.verdict is Verdict.LATE:
        answer.clock = tracker.resume(info.position).clock
    return answer


def settled_answer(push: IncomingPush, model: ShardModel) -> StepAnswer:
    """The answer to one push once everything decided has been done."""
    answer = answer_to(push, model)
    if push.decision is not None:
        tell_skipped(answer, push.info, model)
    return answer


def tell_skipped(answer: StepAnswer, info: PushInfo, model: ShardModel) -> bool:
    """Say in ``answer`` that the step of this push raised, if it did; whether it did."""
    error = model.skipped(info)
    if error is not None:
        answer.outcome, answer.error = "SKIPPED", error
    return error is not None
