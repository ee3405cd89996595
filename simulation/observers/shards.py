"""Observes shards: their restarts, decisions, logs and answers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ps_protocol.errors import VersionGone
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import ShardMap
from ps_server.consistency import OUTCOMES, Tracker, TrackerState, Verdict
from ps_server.log.durable import DurableLog
from ps_server.log.entries import AppliedUpdate, BucketsPut, Loaded, MemoryLog, Released
from ps_server.shard import placing, quiesce, registry
from ps_server.shard.access import Fence
from ps_server.shard.registry import Registry
from ps_server.shard.step import stream as step_stream
from ps_server.shard.step.model import ShardModel
from ps_server.shard.step.model_rows import ModelRows
from ps_server.shard.step.stream import StepStream, StreamCodec
from ps_server.shard.step.values import ModelValues
from ps_server.shard.weights import HeldPiece, HeldPieces, HeldWeights
from ps_server.state.region import Region
from simulation.observers.checkpoints import tell_of_checkpoint
from simulation.observers.moves import owners_of, pieces_of
from simulation.observers.subjects import Shard, Subjects, Wrappers
from simulation.published_judge import TakenPiece

_VERDICTS = {outcome: verdict for verdict, outcome in OUTCOMES.items() if verdict is not Verdict.HOLD}


class ShardObservers:
    """Wrappers around methods of ps-server."""

    def __init__(self, subjects: Subjects) -> None:
        self._subjects = subjects
        self._judge = subjects.judge
        #: By transport: the push that is being answered.
        self._answered: dict[Any, Any] = {}
        #: By codec: the push in whose answer it encodes parameters.
        self._encoding: dict[Any, Any] = {}
        #: By tracker, and by process and name: the shard map of its model.
        self._models: dict[Tracker, ShardMap] = {}
        self._named: dict[tuple[Any, str], ShardMap] = {}

        #: By process and model: the checkpoint that is restored into it, and which of its loads that is; of rows, too.
        self._restoring: dict[tuple[Any, str], str] = {}
        self._loads: dict[tuple[Any, str], tuple[int, int]] = {}
        self._row_loads: dict[tuple[Any, str], tuple[int, int]] = {}

    def forget(self) -> None:
        """Let go of all processes."""
        self._answered.clear()
        self._encoding.clear()
        self._models.clear()
        self._named.clear()
        self._restoring.clear()
        self._loads.clear()
        self._row_loads.clear()

    def wrappers(self) -> Wrappers:
        """All of them."""
        yield from (
            (Fence, "begin", self._fence_begin),
            (Registry, "recover", self._recover),
            (ShardModel, "__init__", self._model_made),
            (ModelValues, "load", self._load),
            (Tracker, "members", self._members),
            (Tracker, "configure", self._configure),
            (Tracker, "attach", self._attach),
            (Tracker, "arrive", self._arrive),
            (Tracker, "push", self._push),
            (Tracker, "take_ready", self._take_ready),
            (DurableLog, "append_all", self._append_all),
            (MemoryLog, "append", self._append),
            (StepStream, "_reply", self._reply),
            (step_stream, "send_published", self._send_published),
            (StreamCodec, "encode", self._encode),
            (ModelRows, "look_up", self._look_up),
            (registry, "log_release", self._log_release),
            (quiesce, "restore", self._restore),
            (placing, "restore", self._restore),
            (HeldWeights, "take", self._take_piece),
            (HeldWeights, "finish", self._finish_piece),
            (HeldPieces, "serve", self._serve_piece),
        )

    def _judged(self, tracker: Tracker) -> int | None:
        """The judge's number for what ``tracker`` decides; None: it is not the shard's, or not any more."""
        shard, model = self._subjects.serving(), self._models.get(tracker)
        return None if shard is None or model is None else self._subjects.place(shard.number, model)

    def _fence_begin(self, original: Any) -> Any:
        def begin(fence: Fence, incarnation: int, token: str) -> None:
            if (shard := self._subjects.shards.get(self._subjects.kernel.process)) is not None:
                shard.incarnation = self._subjects.newest[shard.number] = incarnation
            original(fence, incarnation, token)

        return begin

    def _recover(self, original: Any) -> Any:
        def recover(models_of: Registry, models: Any) -> None:
            shard = self._subjects.serving()
            if shard is not None:
                found = set()
                for model in models.values():
                    version = model.tracker.version
                    value = self._subjects.value_of(model.replica.region, version) if model.initialised else None
                    place = self._subjects.place(shard.number, model.shard_map)
                    found.add(place)
                    self._judge.restored(place, shard.disk.name, model.tracker, value)
                    self._restored_rows(place, model)
                for truth in self._judge.places.of_shard(shard.number):
                    if truth.number not in found:
                        self._judge.restored_nothing(truth.number, shard.disk.name)
            original(models_of, models)

        return recover

    def _restored_rows(self, place: int, model: Any) -> None:
        for table in model.replica.tables:
            layout = model.replica.layout
            owners = owners_of(layout.shard_map, self._judge.rows.known(place))
            ids = np.array([row for row, owner in owners.items() if owner == layout.shard], np.int64)
            values = np.empty((len(ids), table.spec.dim), np.float32)
            table.look_up(ids, values)
            version, shard_map = model.tracker.version, layout.shard_map
            state, rows = self._subjects.own_rows(place, shard_map, version, self._subjects.rows(ids, values))
            self._judge.rows.served(place, version, rows, "restored")
            self._judge.truth[place].row_loads.forget_behind(version, state)

    def _look_up(self, original: Any) -> Any:
        async def look_up(rows: ModelRows, wanted: Any, room: Any = None, **how: Any) -> Any:
            tracker = rows._applier.tracker
            place, shard_map = self._judged(tracker), self._models.get(tracker)
            version, found = await original(rows, wanted, room, **how)
            if place is not None and shard_map is not None and wanted.parts:
                ((_, ids),) = wanted.parts
                values = self._subjects.rows(ids, np.frombuffer(found, np.float32))
                _, values = self._subjects.own_rows(place, shard_map, version, values)
                self._judge.rows.served(place, version, values)
            return version, found

        return look_up

    def _model_made(self, original: Any) -> Any:
        def made(model: ShardModel, start: Any, *arguments: Any, **keywords: Any) -> None:
            shard_map = start.replica.layout.shard_map
            self._models[start.tracker] = self._named[self._subjects.kernel.process, shard_map.spec.name] = shard_map
            original(model, start, *arguments, **keywords)

        return made

    def _load(self, original: Any) -> Any:
        async def load(values: Any, *arguments: Any, **keywords: Any) -> bool:
            written: bool = await original(values, *arguments, **keywords)
            if written and (shard := self._subjects.serving()) is not None:
                place = self._subjects.place(shard.number, values._layout.shard_map)
                self._judge.values_acknowledged(place, shard.disk.name)
            return written

        return load

    def _members(self, original: Any) -> Any:
        def members(tracker: Tracker, live: Any) -> Any:
            if (place := self._judged(tracker)) is not None:
                self._judge.members(place, live)
            return original(tracker, live)

        return members

    def _configure(self, original: Any) -> Any:
        def configure(tracker: Tracker, consistency: Any) -> Any:
            if (place := self._judged(tracker)) is not None:
                self._judge.configured(place, consistency)
            return original(tracker, consistency)

        return configure

    def _attach(self, original: Any) -> Any:
        def attach(tracker: Tracker, worker: Any, *arguments: Any) -> Any:
            position = original(tracker, worker, *arguments)
            if (place := self._judged(tracker)) is not None:
                self._judge.attached(place, worker, position)
            return position

        return attach

    def _arrive(self, original: Any) -> Any:
        def arrive(tracker: Tracker, worker: Any, phase: int) -> None:
            original(tracker, worker, phase)
            if (place := self._judged(tracker)) is not None:
                self._judge.arrived(place, worker, phase)

        return arrive

    def _push(self, original: Any) -> Any:
        def push(tracker: Tracker, info: Any) -> Any:
            decision = original(tracker, info)
            if (place := self._judged(tracker)) is not None:
                self._judge.decided_push(place, info, decision)
            return decision

        return push

    def _take_ready(self, original: Any) -> Any:
        def take_ready(tracker: Tracker, now: float) -> Any:
            place = self._judged(tracker)
            for ready in original(tracker, now):
                if place is not None:
                    self._judge.round_decided(place, ready.position, ready.contributions)
                yield ready

        return take_ready

    def _append(self, original: Any) -> Any:
        def append(log: Any, entry: Any) -> Any:
            self._appended(entry)
            return original(log, entry)

        return append

    def _append_all(self, original: Any) -> Any:
        def append_all(log: Any, entries: Any) -> Any:
            for entry in entries:
                self._appended(entry)
            return original(log, entries)

        return append_all

    def _appended(self, entry: Any) -> None:
        shard = self._subjects.serving()
        shard_map = self._named.get((self._subjects.kernel.process, getattr(entry, "model", "")))
        if shard is None or shard_map is None:
            return
        place = self._subjects.place(shard.number, shard_map)
        if isinstance(entry, AppliedUpdate):
            self._logged(place, shard.number, shard_map, entry)
        elif isinstance(entry, Loaded) and entry.region is not None:
            self._loaded(place, entry.model, entry.region, entry.tracker)
        elif isinstance(entry, BucketsPut):
            self._rows_loaded(place, shard.number, shard_map, entry)

    def _logged(self, place: int, shard: int, shard_map: ShardMap, entry: AppliedUpdate) -> None:
        owners = owners_of(shard_map, self._judge.rows.known(place))
        held = {row for row, owner in owners.items() if owner == shard}
        self._judge.logged(place, entry.version, entry.pushes, entry.step.scale, held, is_round=entry.is_round)

    def _loaded(self, place: int, model: str, region: Region, tracker: TrackerState | None) -> None:
        process, layout = self._subjects.kernel.process, region.layout
        if (folder := self._restoring.get((process, model))) is None:
            self._judge.loaded(place, self._subjects.value_of(region, 0))
            return
        if tracker is not None:
            self._judge.checkpoints.begun(place, folder, model, tracker)
        shard_map = layout.shard_map
        pieces = [piece for span in layout.slices for piece in pieces_of(shard_map, span.slice)]
        load = self._judge.checkpoints.load(place, folder, model, shard_map.epoch, pieces)
        value = self._subjects.value_under(load, region)
        self._loads[process, model] = self._judge.checkpoints.loaded(place, folder, load, value)

    def _rows_loaded(self, place: int, shard: int, shard_map: ShardMap, entry: BucketsPut) -> None:
        process = self._subjects.kernel.process
        if (folder := self._restoring.get((process, entry.model))) is None:
            return
        found: dict[int, float] = {}
        for table, contents in entry.contents:
            dim = shard_map.spec.tables[table].dim
            found |= self._subjects.rows(contents.ids, contents.rows[:, :dim])

        def held(ids: list[int]) -> list[int]:
            return [row for row, owner in owners_of(shard_map, ids).items() if owner == shard]

        self._row_loads[process, entry.model] = self._judge.checkpoints.rows_loaded(
            place, folder, entry.model, shard_map.epoch, found, held
        )

    def _restore(self, original: Any) -> Any:
        async def restore(checkpoint: Any, model: Any, *arguments: Any, **keywords: Any) -> None:
            shard, key = self._subjects.serving(), (self._subjects.kernel.process, model.name)
            if shard is not None:
                tell_of_checkpoint(self._subjects, checkpoint.folder)
            self._restoring[key] = checkpoint.folder.name
            try:
                await original(checkpoint, model, *arguments, **keywords)
            finally:
                self._restoring.pop(key, None)
            loads = self._loads.pop(key, None), self._row_loads.pop(key, None)
            if shard is not None and shard is self._subjects.serving():
                place = self._subjects.place(shard.number, model.layout.shard_map)
                has_rows = any(len(buckets) for buckets in model.layout.buckets)
                self._judge.checkpoints.acknowledged(place, *loads, has_rows=has_rows)

        return restore

    def _log_release(self, original: Any) -> Any:
        async def log_release(context: Any, entry: Released) -> None:
            shard = self._subjects.serving()
            await original(context, entry)
            if shard is not None:
                self._judge.dropped_model(self._judge.places.number(shard.number, entry.model, entry.epoch))

        return log_release

    def _reply(self, original: Any) -> Any:
        async def reply(stream: Any, result: Any, info: Any = None, *others: Any) -> None:
            shard = self._subjects.serving()
            if shard is not None and info is not None:
                place = self._subjects.place(shard.number, stream._model.layout.shard_map)
                self._judge.answers_pull(place, info)
                self._answered[stream._transport] = place, info
            try:
                await original(stream, result, info, *others)
            finally:
                self._answered.pop(stream._transport, None)

        return reply

    def _send_published(self, original: Any) -> Any:
        async def send_published(
            transport: Any, result: Any, published: Any, model: Any, counters: Any, codec: Any = None
        ) -> None:
            shard, answered = self._subjects.serving(), self._answered.get(transport)
            if shard is not None and answered is not None:
                place, info = answered
                value = self._subjects.value_of(published.region, result.version)
                verdict = _VERDICTS.get(result.outcome)
                self._judge.replied(place, shard.disk.name, shard.incarnation, info, verdict, result.version, value)
                self._encoding[codec] = place, info
            try:
                await original(transport, result, published, model, counters, codec)
            finally:
                self._encoding.pop(codec, None)

        return send_published

    def _encode(self, original: Any) -> Any:
        async def encode(codec: Any, absent: Any, region: Region, *, buffers: bool) -> Any:
            encoded = await original(codec, absent, region, buffers=buffers)
            if codec.keeps_error and codec in self._encoding:
                place, info = self._encoding[codec]
                self._judge.assumed(place, info, self._subjects.values(region.layout, codec._reference.held))
            return encoded

        return encode

    def _take_piece(self, original: Any) -> Any:
        async def take(weights: HeldWeights, model: Any, name: str, number: int, kept: Any) -> None:
            serving, version = self._subjects.serving(), model.tracker.version
            await original(weights, model, name, number, kept)
            shard = self._subjects.shards[self._subjects.kernel.process]
            serving = serving if serving is self._subjects.serving() else None
            self._judge.published.taken(shard.number, number, self._piece(serving, model.layout, version))

        return take

    def _piece(self, shard: Shard | None, layout: Layout, version: int) -> TakenPiece:
        """What a shard that is paused at ``version`` has; None: it has lost its place."""
        shard_map, moves = layout.shard_map, self._subjects.moves
        holders = frozenset(shard_map.holders)
        pieces = [piece for span in layout.slices for piece in pieces_of(shard_map, span.slice)]
        if shard is None:
            return TakenPiece(None, holders, version, None, frozenset(), dict.fromkeys(pieces, math.nan))
        place = self._subjects.place(shard.number, shard_map)
        truth = self._judge.truth[place]
        if version > len(truth.history):
            self._judge.fail(f"shard {place} publishes version {version}; {len(truth.history)} were logged")
        (value, _), load = truth.states(version)[-1], truth.loads.bases(version)[-1]
        return TakenPiece(
            place,
            holders,
            version,
            truth.history[version - 1] if version else None,
            frozenset(name for name, applied in truth.applied.items() if applied <= version),
            {piece: value + moves.shift(shard_map, piece, load) for piece in pieces},
        )

    def _finish_piece(self, original: Any) -> Any:
        async def finish(weights: HeldWeights, name: str, number: int) -> HeldPiece:
            piece: HeldPiece = await original(weights, name, number)
            shard = self._subjects.shards[self._subjects.kernel.process]
            self._judge.published.written(shard.number, number, piece.native.checksum)
            return piece

        return finish

    def _serve_piece(self, original: Any) -> Any:
        async def serve(weights: HeldPieces, request: Any, context: Any) -> None:
            shard = self._subjects.serving()
            try:
                await original(weights, request, context)
            except VersionGone:
                if shard is not None and shard is self._subjects.serving():
                    self._judge.published.denied(shard.number, request.number, request.checksum)
                raise

        return serve
