"""Conversion between the part of a model that a shard wrote and its message to the coordinator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert.model import dtype_from_pb, dtype_to_pb
from ps_server.checkpoint.record import Base, FileRecord, Piece, ShardPart, TablePart
from ps_server.consistency import TrackerState
from ps_server.consistency.tracker_state import pushes_from_pb, pushes_to_pb


def part_to_pb(part: ShardPart, pushes: TrackerState) -> pb.CheckpointPart:
    """The message of ``part``, whose facts are ``pushes``."""
    return pb.CheckpointPart(
        model=part.model,
        shard=part.shard,
        epoch=part.epoch,
        pushes=pushes_to_pb(pushes),
        files=[pb.CheckpointFile(**asdict(file)) for file in part.files],
        pieces=_pieces_to_pb(part.pieces),
        tables=[
            pb.CheckpointTable(
                table=table.table,
                shard=table.shard,
                updates=table.updates,
                base=pb.CheckpointBase(folder=table.base.folder, seal=table.base.seal) if table.base else None,
                file=table.file,
                pieces=_pieces_to_pb(table.pieces),
            )
            for table in part.tables
        ],
    )


def part_from_pb(message: pb.CheckpointPart) -> ShardPart:
    """The part in ``message``. Raises InvalidRequest for a dtype that this version does not know."""
    return ShardPart(
        message.model,
        message.shard,
        message.epoch,
        {"tracker": pushes_from_pb(message.pushes).to_json()},
        tuple(FileRecord(file.name, file.size_bytes, file.head_bytes, file.head_checksum) for file in message.files),
        _pieces_from_pb(message.pieces),
        tuple(
            TablePart(
                table.table,
                table.shard,
                table.updates,
                Base(table.base.folder, table.base.seal) if table.HasField("base") else None,
                table.file,
                _pieces_from_pb(table.pieces),
            )
            for table in message.tables
        ),
    )


def _pieces_to_pb(pieces: Iterable[Piece]) -> list[pb.CheckpointPiece]:
    return [pb.CheckpointPiece(**{**asdict(piece), "dtype": dtype_to_pb(piece.dtype)}) for piece in pieces]


def _pieces_from_pb(messages: Iterable[pb.CheckpointPiece]) -> tuple[Piece, ...]:
    return tuple(
        Piece(
            piece.variable,
            piece.row_begin,
            piece.row_end,
            piece.state,
            dtype_from_pb(piece.dtype),
            tuple(piece.shape),
            piece.file,
            piece.at,
            tuple(piece.checksums),
        )
        for piece in messages
    )
