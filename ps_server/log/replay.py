"""Applies the records of a log to models: the same records in the same order make the same bytes."""

from __future__ import annotations

import logging
from collections.abc import Collection

from ps_protocol.errors import InvalidRequest
from ps_protocol.model import ShardMap
from ps_protocol.v1 import log_pb2
from ps_server.log.messages import decode_load, decode_place, decode_prepare, decode_update
from ps_server.log.models import RecoveredModel, new_model
from ps_server.log.row_messages import apply_rows, decode_rows
from ps_server.log.switch import switched
from ps_server.optimizers import StepSkipped

logger = logging.getLogger(__name__)


class Replay:
    """Applies records to models, in order. Used by recovery, and by a standby that follows another shard's log.

    A record is applied to every part that does not contain it yet, so the parts of a snapshot may be of different ages.
    A step that raises is skipped, as it was when it was logged.
    """

    def __init__(self, shard: int, models: dict[str, RecoveredModel], careful: Collection[str] = frozenset()) -> None:
        """``careful``: models of which any step that raises can be undone, for the price of a copy before each."""
        self._shard = shard
        self._careful = careful
        #: The model of which ``take`` may have left half a step, when that raised.
        self.half_done: str | None = None
        self.models = models

    def take(self, number: int, message: bytes, payload: memoryview) -> None:
        """Apply one record. Raises InvalidRequest or DecodeError for one that no log of this version holds."""
        record = log_pb2.LogRecord.FromString(message)
        match record.WhichOneof("body"):
            case "place":
                self._place(decode_place(record.place).shard_map)
            case "load":
                self._load(self._model(record.load.model), number, record.load, payload)
            case "update":
                self._update(self._model(record.update.model), number, record.update, payload)
            case "prepare":
                prepared = decode_prepare(record.prepare, payload, self._shard)
                model = self._model(prepared.shard_map.spec.name)
                if prepared.shard_map.epoch > model.shard_map.epoch:
                    model.pending = prepared
            case "load_rows" | "drop_rows" | "buckets" as kind:
                self._rows(self._model(getattr(record, kind).model), number, record, payload)
            case "switch":
                self._switch(self._model(record.switch.model), record.switch.epoch)
            case other:
                raise InvalidRequest("a log record of an unknown kind", actual=str(other))

    def _place(self, shard_map: ShardMap) -> None:
        """A model that is there already is placed again only where the shard has no slices of it any more."""
        name = shard_map.spec.name
        known = self.models.get(name)
        if known is None or known.shard_map.epoch < shard_map.epoch:
            self.models[name] = new_model(shard_map, self._shard)
        if known is not None and known is not self.models[name]:
            known.moved = True

    def _switch(self, model: RecoveredModel, epoch: int) -> None:
        # A snapshot made after the switch has it already.
        if epoch <= model.shard_map.epoch:
            return
        if model.pending is None or model.pending.shard_map.epoch != epoch:
            raise InvalidRequest(
                f"model '{model.shard_map.spec.name}' switches to epoch {epoch}, which was not prepared",
                expected=f"epoch {model.pending.shard_map.epoch}" if model.pending else "none",
                actual=f"epoch {epoch}",
            )
        self.models[model.shard_map.spec.name] = switched(model, self._shard)

    def _load(self, model: RecoveredModel, number: int, record: log_pb2.LoadRecord, payload: memoryview) -> None:
        model.pending = None
        if model.contains(number):
            return
        if all(number <= known for _, known in model.blocks) and model.blocks:
            return
        loaded = decode_load(record, payload, model.replica.layout)
        model.replica.load(loaded.region, loaded.entries)
        model.loads += 1
        model.initialised |= loaded.region is not None
        if loaded.tracker and number > model.tracker_number:
            model.tracker.restore(loaded.tracker)

    def _update(self, model: RecoveredModel, number: int, record: log_pb2.UpdateRecord, payload: memoryview) -> None:
        model.pending = None
        # Such a record may be of an earlier layout.
        if model.contains(number):
            return
        layout = model.replica.layout
        done = [block for block, known in model.blocks if number <= known]
        update = decode_update(record, payload, model.gradients, model.options)
        if update.model in self._careful:
            model.replica.be_careful()
        raised = False
        try:
            if len(done) < len(model.blocks) or not model.blocks:
                without = frozenset[int]().union(*(block.slices for block in done))
                buffers = not any(block.first >= layout.parameter_slices for block in done)
                model.replica.apply(update.step, without=without, buffers=buffers, skipped=model.skipped(number))
            elif update.step.tables:
                model.replica.apply_rows(update.step, model.skipped(number))
        except StepSkipped as skipped:
            raised = True
            logger.warning("shard %d: record %d of its log: %s", self._shard, number, skipped)
        except Exception:
            self.half_done = update.model
            raise
        if number > model.tracker_number:
            model.tracker.replay(update.pushes, update.version, is_round=update.is_round)
            if raised:
                model.tracker.failed(update.pushes)

    def _rows(self, model: RecoveredModel, number: int, record: log_pb2.LogRecord, payload: memoryview) -> None:
        model.pending = None
        # Such a record may be of an earlier layout.
        if not model.contains(number):
            entry = decode_rows(record, payload, model.shard_map.spec)
            apply_rows(model.replica, entry, model.skipped(number))

    def _model(self, name: str) -> RecoveredModel:
        if name not in self.models:
            raise InvalidRequest(f"the log holds records of model '{name}', which it never placed")
        return self.models[name]
