"""Publishes versions of the weights on the shards, while training goes on."""

from __future__ import annotations

import json
import queue
import secrets
import threading
from collections.abc import Mapping
from typing import Any

from ps_protocol.cluster.weights import PublishAsk
from ps_protocol.errors import InvalidRequest, PsError, Retryable
from ps_protocol.logs import EventLogger
from ps_protocol.retry import COORDINATOR, Attempts
from ps_worker.session.session import Session

logger = EventLogger("ps_worker")

_END_SECONDS = 60.0
"""At a clean end the last version is waited for so long."""

#: A number and whether it is committed, an error, or the end.
_Told = queue.SimpleQueue[tuple[int, bool] | Exception | None]


class Publishing:
    """Of one ``Cluster``; used from its thread. At most one version is on its way."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._under_way: threading.Thread | None = None

    def publish(
        self, name: str, model: str, step: int, metadata: Mapping[str, Any] | None, keep: int, *, wait: bool
    ) -> int:
        """See Cluster.publish."""
        ask = PublishAsk(name, model, _step(step), _json(metadata), _keep(keep), secrets.token_hex(16))
        attempts = Attempts(COORDINATOR.within(self._session.config.reconnect_timeout_seconds))
        while True:
            try:
                return self._once(ask, wait=wait)
            except Retryable as error:
                self._session.check()
                self._session.wait_hint(f"waiting to publish '{name}': {error.message}")
                attempts.sleep_after(error)

    def finish(self, seconds: float = _END_SECONDS) -> None:
        """Wait for the version on its way."""
        if (thread := self._under_way) is not None:
            thread.join(seconds)
            self._under_way = None

    def _once(self, ask: PublishAsk, *, wait: bool) -> int:
        self.finish()
        told: _Told = queue.SimpleQueue()
        # A signal handler that raises inside gRPC may leave a lock held: a thread without signals reads the call.
        self._under_way = threading.Thread(target=self._call, args=(ask, told), name="ps-publish", daemon=True)
        self._under_way.start()
        while (event := told.get()) is not None:
            if isinstance(event, Exception):
                raise event
            number, committed = event
            if committed or not wait:
                return number
        raise InvalidRequest("the coordinator did not say what became of a version")

    def _call(self, ask: PublishAsk, told: _Told) -> None:
        """In its thread, to the end of the version also where nobody listens any more."""
        taken = 0
        try:
            for number, committed in self._session.publish(ask):
                taken = 0 if committed else number
                told.put((number, committed))
        except PsError as error:
            if taken:
                logger.warning(
                    "weights.failed",
                    "version %d of '%s' (step %d) is not published: %s",
                    taken,
                    ask.name,
                    ask.step,
                    error,
                )
            told.put(error)
        except Exception as error:  # noqa: BLE001  (raised where the version is waited for)
            told.put(error)
        finally:
            told.put(None)


def _step(step: int) -> int:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 1 << 63:
        raise InvalidRequest("a step is a number from 0", actual=repr(step)[:100])
    return step


def _keep(keep: int) -> int:
    if isinstance(keep, bool) or not isinstance(keep, int):
        raise InvalidRequest("versions that are kept have a number", expected="1, 2, 3, …", actual=repr(keep)[:100])
    return keep


def _json(metadata: Mapping[str, Any] | None) -> str:
    try:
        return json.dumps(dict(metadata or {}), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the metadata of a version is no JSON object: {error}") from error
