"""Decides who uploads a model's first values, and waits until every shard has its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ps_protocol.errors import NotReady
from ps_worker.flat import FlatModel
from ps_worker.interfaces import TrainingSession
from ps_worker.lane import Lane
from ps_worker.tables.initial import InitialRows, uploads
from ps_worker.tables.places import RowPlaces

INITIAL_TIMEOUT_SECONDS = 600.0
"""How long to wait for the worker that uploads the initial values."""

_POLL_SECONDS = 0.1

#: Does what may be repeated until the shard of a lane answers.
Persistently = Callable[[Lane, Callable[[], Any]], Any]


class FirstValues:
    """Used by the thread that starts a pipeline."""

    def __init__(self, session: TrainingSession, flat: FlatModel, rows: InitialRows, timeout_seconds: float) -> None:
        self._session = session
        self._flat = flat
        self._rows = rows
        self._timeout_seconds = timeout_seconds

    def bring(self, empty: Sequence[Lane], places: RowPlaces, persistently: Persistently) -> None:
        """Upload what the ``empty`` shards begin with when that falls to this worker, else wait until another has.

        Raises NotReady when nobody does in time, and PsError.
        """
        name = places.shard_map.spec.name
        deadline = time.monotonic() + self._timeout_seconds
        while empty:
            if self._session.initialiser():
                self._upload({lane.shard: lane for lane in empty}, places, persistently)
                return
            empty = [lane for lane in empty if not persistently(lane, lane.initialised)]
            if empty and time.monotonic() > deadline:
                raise NotReady(
                    f"no worker uploaded the initial values of model '{name}' within {self._timeout_seconds:g} seconds",
                    shard=str(empty[0].shard),
                    remedy="see whether the worker of the lowest rank is stuck before its cluster.optimizer(...)",
                )
            if empty:
                self._session.wait_hint(f"waiting for the initial values of model '{name}' from the lowest rank")
                time.sleep(_POLL_SECONDS)

    def _upload(self, empty: Mapping[int, Lane], places: RowPlaces, persistently: Persistently) -> None:
        # Rows come first: with its region a shard has all its values, and training may begin.
        for call in uploads(self._rows, places):
            if call.shard in empty:
                persistently(empty[call.shard], partial(empty[call.shard].load_rows, call))
        self._flat.collect_values()
        for lane in empty.values():
            persistently(lane, lane.load_region)
