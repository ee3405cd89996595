"""Owns the versions that a relay has received, and answers its readers as coordinator and shards of the job do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace

from ps_protocol.cluster.weights import FollowAnswer, FollowAsk, ShardHome, WeightsState, WeightsVersion, check_name
from ps_protocol.errors import DamagedData, InvalidRequest, Unavailable, VersionGone
from ps_protocol.model.spec import DType, Variable
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.weights.memory import Room
from ps_protocol.weights.pieces import ReceivedPiece
from ps_protocol.wire.convert.model import dtype_from_pb
from ps_server.coordinator.publications import Publications
from ps_server.coordinator.times import PARKED_SECONDS
from ps_server.shard.transport.grpc_stream import Context
from ps_server.shard.transport.side_channels import SideChannels
from ps_server.shard.weights import HeldPiece, HeldPieces, PieceForm
from ps_server.tasks import Conditions

_INCARNATION = 1
"""Of the one that holds all pieces here."""

_SOON_SECONDS = 1.0
"""A version that the job has is waited for so long before the reader is asked to come again."""


class PieceRoom:
    """The memory of one piece: its tensors stand in it one behind the other, as they do on a shard."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self._left = room.data.data

    def place(self, tensor: pb.PieceTensor, variable: Variable) -> memoryview:
        """See Places."""
        rows = tensor.row_end - tensor.row_begin
        size = rows * variable.row_bytes
        if not 0 <= rows <= variable.rows or size > len(self._left):
            raise DamagedData(
                f"a version of published weights is damaged: '{variable.name}' {variable.shape} is not of its size",
                remedy="ask for the full version",
            )
        place, self._left = self._left[:size], self._left[size:]
        return place

    def adopt(self, tensor: pb.PieceTensor, variable: Variable, data: memoryview) -> memoryview:
        """See Places. A copy: what is here is shared with others."""
        place = self.place(tensor, variable)
        place[:] = data
        return place


@dataclass(frozen=True, slots=True)
class RelayedVersion:
    """A version, with its pieces by shard, and the memory of each."""

    version: WeightsVersion
    pieces: dict[int, tuple[ReceivedPiece, PieceRoom]]

    @property
    def number(self) -> int:
        """Of the version."""
        return self.version.number

    @property
    def job_id(self) -> str:
        """Of the job that made it."""
        return self.version.job_id


Confirm = Callable[[FollowAsk], Awaitable[None]]
"""Asks the job whether it has the versions that a reader names. Raises UnknownVersion, VersionGone where it has not."""


class RelayedWeights:
    """Called by the service and by who follows the job, on the relay's event loop.

    Versions of a name are the newest ``keep``, and as many that readers are receiving.
    """

    def __init__(
        self,
        names: Collection[str],
        keep: int,
        confirm: Confirm,
        side_channels: SideChannels | None,
        dtype: DType | None = None,
    ) -> None:
        """``names``: what it serves; none: everything that is published. ``dtype``: to which values were converted
        before they came; None: as they were trained.
        """
        #: Of this relay, for readers.
        self.address = ""
        self._only = frozenset(names)
        self._keep = keep
        self._dtype = dtype
        self._confirm = confirm
        self._side_channels = side_channels
        self._publications = Publications()
        self._pieces: dict[int, HeldPieces] = {}
        self._turn = asyncio.Lock()
        #: By name, the job of its versions.
        self._jobs: dict[str, str] = {}
        #: Names of which no version follows.
        self._finished: set[str] = set()
        self._has_ended_empty = False
        self._changes = Conditions()
        self._ending = False

    def end(self) -> None:
        """Readers that wait are told to ask again: another relay may be there by then."""
        self._ending = True
        self._changes.wake()

    async def close(self) -> None:
        """Make nothing more."""
        for pieces in self._pieces.values():
            await pieces.close()

    # -- what is received

    def put(self, name: str, received: RelayedVersion) -> None:
        """Serve a version; older ones that nobody wants go."""
        own = tuple(replace(piece, incarnation=_INCARNATION, directory="") for piece in received.version.pieces)
        version = replace(received.version, pieces=own)
        committed = {piece.shard: piece.checksum for piece in own}
        # Before a reader is told of it.
        for shard, (piece, room) in received.pieces.items():
            form = PieceForm.of(piece.manifest, room.room, piece.encoded)
            self._of(shard).put(HeldPiece(form, None, checked=True, committed=committed[shard]))
        kept = self._publications.adopt(name, version, self._keep, time.monotonic(), time.time())
        for pieces in self._pieces.values():
            pieces.keep(name, kept)
        self._jobs[name] = version.job_id
        self._finished.discard(name)
        self._changes.wake()

    def forget(self, name: str) -> None:
        """What is here is of another job."""
        self._publications.forget(name)
        self._jobs.pop(name, None)
        for pieces in self._pieces.values():
            pieces.keep(name, ())
        self._finished.discard(name)
        self._changes.wake()

    def finish(self, name: str) -> None:
        """The job is finished: no version follows."""
        self._finished.add(name)
        self._changes.wake()

    def ended_empty(self, is_so: bool) -> None:
        """Whether the job is finished and has published nothing: no version follows under any name."""
        if is_so is not self._has_ended_empty:
            self._has_ended_empty = is_so
            self._changes.wake()

    def readers(self, name: str) -> int:
        """How many read ``name`` here, and from those who do."""
        return self._publications.count_readers(name, time.monotonic())

    @property
    def shares_memory(self) -> bool:
        """Whether readers of this host may map it."""
        return self._side_channels is not None and self._side_channels.shares_memory

    @property
    def is_read(self) -> bool:
        """Whether a reader may ask again."""
        return any(state.reader_count for state in self.states())

    @property
    def pieces(self) -> list[tuple[str, int, int]]:
        """Name, number and bytes of each piece that is here."""
        return [piece for each in self._pieces.values() for piece in each.held]

    @property
    def sent_bytes(self) -> tuple[int, int]:
        """To readers, as deltas and whole."""
        pieces = self._pieces.values()
        return sum(each.delta_bytes for each in pieces), sum(each.full_bytes for each in pieces)

    def _of(self, shard: int) -> HeldPieces:
        if shard not in self._pieces:
            holder = f"the relay at {self.address}"
            self._pieces[shard] = HeldPieces(shard, holder, self._side_channels, self._turn)
        return self._pieces[shard]

    # -- what readers ask

    def states(self) -> tuple[WeightsState, ...]:
        """See Publications.states."""
        return self._publications.states(self._homes, time.monotonic())

    async def follow(self, ask: FollowAsk, wait_seconds: float) -> FollowAnswer:
        """See Publications.follow; waits up to ``wait_seconds`` for a version that is newer.

        Raises InvalidRequest for a name that is not served here, UnknownVersion and VersionGone where the job does not
        have what is named, and Unavailable for a version that is not here yet.
        """
        if not ask.leaves:
            check_name(ask.name)
            self._check_served(ask.name)
        if ask.number:
            wait_seconds = max(wait_seconds, _SOON_SECONDS)
        deadline = time.monotonic() + min(wait_seconds, PARKED_SECONDS)
        #: The job of what was here when the job was asked.
        asked_with: str | None = None
        while True:
            if self._ending:
                raise Unavailable(f"the relay at {self.address} stops", remedy="start it again, or ask another one")
            # Again where another job has begun meanwhile: its numbers mean other versions.
            if self._is_unknown(ask) and asked_with != (job_id := self._jobs.get(ask.name, "")):
                asked_with = job_id
                await self._confirm(ask)
            answer = self._answer(ask)
            left = deadline - time.monotonic()
            if answer.version is not None or answer.finished or ask.leaves:
                return answer
            if left <= 0:
                break
            await self._changes.changed(left)
        if ask.number:
            raise Unavailable(
                f"version {ask.number} of '{ask.name}' has not come to this relay yet", remedy="ask again"
            )
        return answer

    def _answer(self, ask: FollowAsk) -> FollowAnswer:
        finished = ask.name in self._finished or (self._has_ended_empty and not ask.have)
        if self._is_unknown(ask):
            # The job has it, and this relay will.
            is_end = finished and not ask.number and not self._is_foreign(ask)
            return FollowAnswer(None, {}, self._publications.number_of(ask.name), is_end)
        try:
            return self._publications.follow(ask, self._homes, time.monotonic(), finished=finished)
        except VersionGone as error:
            raise VersionGone(
                f"version {ask.number} of '{ask.name}' is not at this relay any more",
                expected=error.expected,
                actual=error.actual,
                remedy=f"read the newest version, or ask the job itself: this relay keeps the newest {self._keep}",
            ) from error

    def _is_unknown(self, ask: FollowAsk) -> bool:
        """Whether a reader names a version that this relay does not have, and has not had."""
        if ask.leaves:
            return False
        return self._is_foreign(ask) or (ask.number or ask.have) > self._publications.number_of(ask.name)

    def _is_foreign(self, ask: FollowAsk) -> bool:
        """Whether a reader builds on a version of another job than the one that is here."""
        job_id = self._jobs.get(ask.name, "")
        return bool(not ask.number and ask.have and ask.job_id and job_id and ask.job_id != job_id)

    @property
    def _homes(self) -> dict[int, ShardHome]:
        return {shard: ShardHome(_INCARNATION, "", self.address) for shard in self._pieces}

    def _check_served(self, name: str) -> None:
        if self._only and name not in self._only:
            raise InvalidRequest(
                f"this relay does not serve '{name[:100]}'",
                expected=", ".join(sorted(self._only)),
                actual=name[:100],
                remedy="read it from the job itself, or give the relay this name, or --all",
            )

    @staticmethod
    def _check_dtype(request: pb.GetPieceRequest, here: DType) -> None:
        asked = dtype_from_pb(request.dtype) if request.dtype else None
        if asked is not here:
            what = asked.value if asked else "as trained"
            raise InvalidRequest(
                f"this relay has '{request.name[:100]}' as {here.value} alone, and is asked for it {what}",
                expected=f"dtype {here.value}",
                actual=what,
                remedy=f"ask for {here.value}, as with subscribe(dtype=torch.{here.value}), or ask the job itself",
            )

    async def serve(self, request: pb.GetPieceRequest, context: Context) -> None:
        """See HeldPieces.serve. Raises InvalidRequest for another dtype than the one that is here."""
        if self._dtype is not None:
            self._check_dtype(request, self._dtype)
            request.ClearField("dtype")
        for pieces in self._pieces.values():
            if pieces.holds(request.name, request.number, request.checksum):
                await pieces.serve(request, context)
                return
        raise VersionGone(
            f"version {request.number} of '{request.name[:100]}' is not at this relay any more",
            remedy="read the newest version",
        )
