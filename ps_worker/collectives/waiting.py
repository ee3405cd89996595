"""Waits in an exchange, and keeps workers that still train from waiting for this one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ps_protocol.cluster.exchange import ExchangeKey, ExchangeState
from ps_protocol.errors import PsError
from ps_worker import times
from ps_worker.multi_model.deadlock_avoidance import is_needed, worker_clocks
from ps_worker.session.reporting import log
from ps_worker.session.session import Session
from ps_worker.step.remote_model import RemoteModel


def wait_for_exchange(
    session: Session, models: Iterable[RemoteModel], key: ExchangeKey, payload: bytes
) -> ExchangeState:
    """Give ``payload`` and wait until the exchange is complete. Called by the training thread. Raises PsError.

    In bounded modes a worker with more steps before the exchange waits, in such a step, for this one. Then this worker
    makes a no-op step of that model, and catches up at the end. It makes none for a worker that is ahead since it has
    left the exchange: the clocks are asked first, and the exchange must be open after that.
    """
    advanced: dict[str, RemoteModel] = {}
    wait_seconds = 0.5
    while not (state := session.exchange(key, payload, wait_seconds)).complete:
        session.check()
        session.wait_hint(f"waiting in the exchange {key} for worker " + ", ".join(map(str, state.missing)))
        wait_seconds = 0.5
        if (needed := list(_needed(session, models))) and not session.exchange(key, payload, 0.0).complete:
            for model in needed:
                if model.name not in advanced:
                    model.begin_waiting()
                model.no_op_step()
                advanced[model.name] = model
            wait_seconds = times.NO_OP_AGAIN_SECONDS
    for model in advanced.values():
        model.catch_up()
    return state


def _needed(session: Session, models: Iterable[RemoteModel]) -> Iterator[RemoteModel]:
    """The models of which another worker has stepped further than it may without this one."""
    consistency = session.consistency
    if not consistency.mode.bounded:
        return
    for model in models:
        try:
            if is_needed(session.rank, worker_clocks(session, model), consistency, by_older=False):
                yield model
        except PsError as error:
            log.debug("the clocks of other workers are not known: %s", error)
