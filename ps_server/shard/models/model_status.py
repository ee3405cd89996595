"""Where one model stands on a shard, for those who ask."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import zip_longest

from ps_protocol.cluster.model_status import ModelStatus, TableStatus, WorkerStatus
from ps_server.shard.step.model import ShardModel


def model_status(model: ShardModel) -> ModelStatus:
    """Where ``model`` stands now."""
    tracker, (options, row_options) = model.tracker, model.options
    return ModelStatus(
        epoch=model.layout.shard_map.epoch,
        version=tracker.version,
        initialised=model.values.told,
        clocks=tuple(
            WorkerStatus(
                standing.worker.rank,
                standing.worker.incarnation,
                standing.position.phase,
                standing.position.clock,
                standing.last_sequence,
                model.streams.transports.get(standing.worker),
                standing.worker in model.supplied,
            )
            for standing in tracker.clocks()
        ),
        staleness_counts=tuple(tracker.counts.staleness),
        outcomes=tracker.counts.outcomes,
        parked_pulls=model.parked_pulls,
        assigned=model.values.assigned,
        assigned_checksums=model.values.checksums,
        learning_rates=tuple(map(_learning_rate, options)),
        tables=tuple(
            TableStatus(
                name=table.spec.name,
                rows=table.rows,
                waiting=table.waiting,
                size_bytes=table.size_bytes,
                updates=table.updates,
                inserted=table.inserted,
                expired=table.expired,
                evicted=table.evicted,
                learning_rate=rate,
            )
            for table, rate in zip_longest(model.tables, map(_learning_rate, row_options))
        ),
    )


def _learning_rate(options: Mapping[str, object]) -> float:
    rate = options.get("lr")
    return float(rate) if isinstance(rate, int | float) else math.nan
