"""Publishes versions of the weights on the shards, while training goes on."""

from __future__ import annotations

import json
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

from ps_protocol.cluster.weights import PublishAsk, check_metadata_size, check_name, number_of
from ps_protocol.errors import InvalidRequest, PsError, Retryable, Unavailable
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

    def __init__(self, session: Session, keep_open: Callable[[], None]) -> None:
        """``keep_open`` is called before each attempt: see TrainedModels."""
        self._session, self._keep_open = session, keep_open
        self._under_way: threading.Thread | None = None
        #: Why the last version that nobody waited for is missing, which the shards had taken.
        self._missing: Exception | None = None

    def publish(
        self, name: str, model: str, step: int, metadata: Mapping[str, Any] | None, keep: int, *, wait: bool
    ) -> int:
        """See Cluster.publish."""
        check_name(name)
        ask = PublishAsk(name, model, _step(step), _json(metadata), _keep(keep), secrets.token_hex(16))
        self._finish()
        missing, self._missing = self._missing, None
        # This version takes the number of one for which a server was lost.
        if missing is not None and not isinstance(missing, Unavailable):
            raise missing
        attempts = Attempts(COORDINATOR.within(self._session.config.reconnect_timeout_seconds))
        while True:
            try:
                self._keep_open()
                return self._once(ask, wait=wait)
            except Retryable as error:
                self._session.check()
                self._session.wait_hint(f"waiting to publish '{name}': {error.message}")
                attempts.sleep_after(error)

    def finish(self) -> None:
        """Wait for the version on its way, at a clean end. Raises why the last version is missing, if it is."""
        self._finish()
        missing, self._missing = self._missing, None
        if missing is not None:
            raise missing

    def _finish(self) -> None:
        if (thread := self._under_way) is not None:
            thread.join(_END_SECONDS)
            self._under_way = None

    def _once(self, ask: PublishAsk, *, wait: bool) -> int:
        self._finish()
        told: _Told = queue.SimpleQueue()
        # A signal handler that raises inside gRPC may leave a lock held: a thread without signals reads the call.
        self._under_way = threading.Thread(target=self._call, args=(ask, told, wait), name="ps-publish", daemon=True)
        self._under_way.start()
        while (event := told.get()) is not None:
            if isinstance(event, Exception):
                raise event
            number, committed = event
            if committed or not wait:
                return number
        raise InvalidRequest("the coordinator did not say what became of a version")

    def _call(self, ask: PublishAsk, told: _Told, wait: bool) -> None:
        """In its thread, to the end of the version also where nobody listens any more."""
        taken = 0
        try:
            for number, committed in self._session.publish(ask):
                taken = 0 if committed else number
                told.put((number, committed))
        except Exception as error:  # noqa: BLE001  (raised where the version is waited for, or later)
            if taken and not wait:
                text = f"version {taken} of '{ask.name}' (step {ask.step}) is not published"
                logger.warning("weights.failed", "%s: %s", text, error)
                self._missing = _of(error, text)
            told.put(error)
        finally:
            told.put(None)


def _of(error: Exception, text: str) -> Exception:
    """``error`` with ``text`` before it."""
    if isinstance(error, PsError):
        error = copy(error)
        error.message = f"{text}: {error.message}"
        error.args = (error.message,)
    return error


def _step(step: int) -> int:
    if (number := number_of(step)) is None:
        raise InvalidRequest("a step is a whole number from 0", actual=repr(step)[:100])
    return number


def _keep(keep: int) -> int:
    if isinstance(keep, bool) or not isinstance(keep, int):
        raise InvalidRequest("versions that are kept have a number", expected="1, 2, 3, …", actual=repr(keep)[:100])
    return keep


def _json(metadata: Mapping[str, Any] | None) -> str:
    try:
        text = json.dumps(dict(metadata or {}), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the metadata of a version is no JSON object: {error}") from error
    check_metadata_size(text)
    return text
