"""Uploads the first values of a model, or waits until another worker has."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ps_protocol.errors import NotReady
from ps_worker.memory.flat import FlatModel
from ps_worker.model.optimizer_state import StateByNumber, split_state
from ps_worker.session.session import Session
from ps_worker.step.shard_stream import ShardStream
from ps_worker.tables.row_payloads import InitialRows, RowRouter, uploads

#: Repeats a call until the shard of a stream answers.
Persistently = Callable[[ShardStream, Callable[[], Any]], Any]


class FirstValues:
    """Used by the thread that starts a pipeline."""

    def __init__(
        self, session: Session, flat: FlatModel, rows: InitialRows, state: StateByNumber, timeout_seconds: float
    ) -> None:
        """``state``: of the optimizer; forgotten when it has been uploaded, or is not needed."""
        self._session = session
        self._flat = flat
        self._rows = rows
        self._state = state
        self._timeout_seconds = timeout_seconds
        #: Whether this worker's values became those of a shard.
        self.uploaded = False

    def bring(self, empty: Sequence[ShardStream], router: RowRouter, persistently: Persistently) -> None:
        """Upload the first values of the ``empty`` shards if this worker has the lowest rank, else wait until it has.

        Raises NotReady when no worker does in time, and PsError.
        """
        name = router.shard_map.spec.name
        deadline = time.monotonic() + self._timeout_seconds
        while empty:
            if self._session.initialiser():
                self._upload({stream.shard: stream for stream in empty}, router, persistently)
                break
            while empty and persistently(empty[0], empty[0].values.initialised):
                empty = empty[1:]
            if empty and time.monotonic() > deadline:
                raise NotReady(
                    f"no worker uploaded the initial values of model '{name}' within {self._timeout_seconds:g} seconds",
                    shard=str(empty[0].shard),
                    remedy="see whether the worker of the lowest rank is stuck before its cluster.optimizer(...)",
                )
            if empty:
                self._session.wait_hint(f"waiting for the initial values of model '{name}' from the lowest rank")
                time.sleep(0.1)
        self._state = {}

    def _upload(self, empty: Mapping[int, ShardStream], router: RowRouter, persistently: Persistently) -> None:
        # Rows first: once a shard has its region, it counts as complete and training may begin.
        for call in uploads(self._rows, router):
            if call.shard in empty:
                persistently(empty[call.shard], partial(empty[call.shard].values.load_rows, call))
        self._flat.collect_values()
        for stream in empty.values():
            # Together: training may begin when a shard has its region.
            state = split_state(stream.layout, self._state) if self._state else ()
            persistently(stream, partial(stream.values.load_region, state))
        self.uploaded = True
