"""Applies the records of a log to models: the same records in the same order make the same bytes."""

from __future__ import annotations

from collections.abc import Collection

from ps_protocol.errors import InvalidRequest
from ps_protocol.logs import EventLogger
from ps_protocol.model.spec import ShardMap
from ps_server.log.messages import LoggedRecord, apply_rows
from ps_server.optimizers.undo import StepSkipped
from ps_server.state.model_state import ModelState, new_model
from ps_server.state.reshard import resharded
from ps_server.tables.row_memory import RowMemory

logger = EventLogger(__name__)


class Replay:
    """Applies records to models, in order. Used by recovery, and by a standby that follows another shard's log.

    A record is applied to every part that does not contain it yet, so the parts of a snapshot may be of different ages.
    A step that raises is skipped, as it was when it was logged.
    """

    def __init__(
        self,
        shard: int,
        models: dict[str, ModelState],
        careful: Collection[str] = frozenset(),
        row_memory: RowMemory | None = None,
    ) -> None:
        """``careful``: models of which any step that raises can be undone, for the price of a copy before each.

        ``row_memory``: of new models.
        """
        self._shard = shard
        self._careful = careful
        self._row_memory = row_memory
        #: The model of which ``take`` may have left half a step, when that raised.
        self.half_done: str | None = None
        self.models = models

    def take(self, number: int, message: bytes, payload: memoryview) -> None:
        """Apply one record. Raises InvalidRequest or DecodeError for one that no log of this version holds."""
        record = LoggedRecord(message, payload)
        match record.kind:
            case "place":
                self._place(record.place().shard_map)
            case "load":
                self._load(self._model(record.model), number, record)
            case "update":
                self._update(self._model(record.model), number, record)
            case "prepare":
                prepared = record.prepare(self._shard)
                model = self._model(prepared.shard_map.spec.name)
                if prepared.shard_map.epoch > model.shard_map.epoch:
                    model.pending = prepared
            case "switch":
                self._switch(self._model(record.model), record.epoch())
            case "load_rows" | "drop_rows" | "buckets":
                self._rows(self._model(record.model), number, record)
            case "release":
                self._release(record.model, record.released().epoch)
            case other:
                raise InvalidRequest("a log record of an unknown kind", actual=other)

    def _place(self, shard_map: ShardMap) -> None:
        """A model that is there already is placed again only where the shard has no slices of it any more."""
        name = shard_map.spec.name
        known = self.models.get(name)
        if known is None or known.shard_map.epoch < shard_map.epoch:
            self.models[name] = new_model(shard_map, self._shard, self._row_memory)
        if known is not None and known is not self.models[name]:
            known.moved = True

    def _release(self, name: str, epoch: int) -> None:
        # A snapshot made after the release may have another model of this name already.
        known = self.models.get(name)
        if known is not None and known.shard_map.epoch <= epoch:
            del self.models[name]
            known.moved = True

    def _switch(self, model: ModelState, epoch: int) -> None:
        # A snapshot made after the switch has it already.
        if epoch <= model.shard_map.epoch:
            return
        if model.pending is None or model.pending.shard_map.epoch != epoch:
            raise InvalidRequest(
                f"model '{model.shard_map.spec.name}' is resharded to epoch {epoch}, and nothing was staged for it",
                expected=f"epoch {model.pending.shard_map.epoch}" if model.pending else "none",
                actual=f"epoch {epoch}",
            )
        self.models[model.shard_map.spec.name] = resharded(model, self._shard)

    def _load(self, model: ModelState, number: int, record: LoggedRecord) -> None:
        model.pending = None
        if model.contains(number):
            return
        if all(number <= known for _, known in model.blocks) and model.blocks:
            return
        loaded = record.load(model.replica.layout)
        model.replica.load(loaded.region, loaded.entries)
        model.loads += 1
        model.initialised |= loaded.region is not None
        if loaded.tracker and number > model.tracker_number:
            model.tracker.restore(loaded.tracker)

    def _update(self, model: ModelState, number: int, record: LoggedRecord) -> None:
        model.pending = None
        # Such a record may be of an earlier layout.
        if model.contains(number):
            return
        layout = model.replica.layout
        done = [block for block, known in model.blocks if number <= known]
        update = record.update(model.gradients, model.options)
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
            logger.warning("recovery", "shard %d: record %d of its log: %s", self._shard, number, skipped)
        except Exception:
            self.half_done = update.model
            raise
        if number > model.tracker_number:
            norm = update.step.squared_norm
            model.tracker.replay(update.pushes, update.version, is_round=update.is_round, squared_norm=norm)
            if raised:
                model.tracker.counts.failed(len(update.pushes))

    def _rows(self, model: ModelState, number: int, record: LoggedRecord) -> None:
        model.pending = None
        # Such a record may be of an earlier layout.
        if not model.contains(number):
            entry = record.rows(model.shard_map.spec)
            apply_rows(model.replica, entry, model.skipped(number))

    def _model(self, name: str) -> ModelState:
        if name not in self.models:
            raise InvalidRequest(f"the log holds records of model '{name}', which it never placed")
        return self.models[name]
