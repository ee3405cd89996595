"""Decides whether a process may become a member at all: protocol version, token, shard number, what state it brings."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ps_protocol import PROTOCOL_VERSION
from ps_protocol.errors import Fenced, InvalidRequest, NotReady, PlaceTaken, ProtocolVersionMismatch, UnknownShard
from ps_protocol.view import Role
from ps_server.coordinator.job_limits import check_length

_HIGHEST_INCARNATION = 1 << 62
"""Far above any real one; what a process brings must leave room for those that follow it."""

_MOST_SHARDS = 4096
"""Beyond, a number is a slip of the hand: all numbers below it would be added, too."""


_MOST_RANKS = 1 << 16


@dataclass(frozen=True, slots=True)
class Applicant:
    """A process that asks to join."""

    role: Role
    #: None: the lowest free one.
    index: int | None
    address: str
    token: str
    protocol_version: int = PROTOCOL_VERSION
    host: str = ""
    pid: int = 0
    #: Shards: the incarnation that wrote the state it holds last; 0 when it holds none.
    data_incarnation: int = 0
    #: Shards and standbys: name of the data directory; empty without one. Its lock says that no other process uses it.
    directory: str = ""
    #: Shards: take the place only when it is vacant and this directory holds everything acknowledged.
    yields: bool = False
    #: Shards: a number that the job does not have yet is added to it.
    add: bool = False
    #: The same for all processes that a supervisor starts for a place, each after the end of the one before it.
    lineage: str = ""
    #: Take the place from a process that may live.
    take_over: bool = False

    def adds(self, shards: int) -> bool:
        """Whether this one makes a job of ``shards`` shards larger."""
        return self.add and self.role is Role.SHARD and self.index is not None and self.index >= shards


@dataclass(frozen=True, slots=True)
class Copies:
    """The data directories that hold the newest state of a shard's place."""

    #: Of the shard that wrote it.
    writer: str = ""
    #: Number of that shard's last word on its standby.
    word: int = 0
    #: Of the standby that has everything acknowledged; empty: none has.
    standby: str = ""

    def include(self, directory: str) -> bool:
        """Whether ``directory`` is one of them."""
        return bool(directory) and directory in (self.writer, self.standby)


def check_applicant(ask: Applicant, shards: int, workers: int) -> None:
    """Raises ProtocolVersionMismatch, InvalidRequest, or UnknownShard for a number that is none of ``shards``.

    A shard that is to be added may have a higher number. ``workers``: how many a job of a fixed number has; else 0.
    """
    if ask.protocol_version != PROTOCOL_VERSION:
        raise ProtocolVersionMismatch(
            f"the {ask.role.value} speaks protocol version {ask.protocol_version}, the coordinator {PROTOCOL_VERSION}",
            expected=str(PROTOCOL_VERSION),
            actual=str(ask.protocol_version),
            remedy="install the same torch-ps on both sides",
        )
    for what in ("address", "host", "token", "directory", "lineage"):
        check_length(f"the {what} of a {ask.role.value} that joins", getattr(ask, what))
    if ask.role in (Role.WORKER, Role.EVALUATOR) and (ask.index or 0) >= _MOST_RANKS:
        raise InvalidRequest(f"{ask.role.value} {ask.index} cannot be", expected=f"a number below {_MOST_RANKS}")
    if not ask.token:
        raise InvalidRequest("a join needs a token", expected="a random text, the same in every repetition")
    if not 0 <= ask.data_incarnation <= (_HIGHEST_INCARNATION if ask.role is Role.SHARD else 0):
        raise InvalidRequest(
            f"a {ask.role.value} cannot hold state of incarnation {ask.data_incarnation}",
            expected=f"0 to {_HIGHEST_INCARNATION}" if ask.role is Role.SHARD else "0: only shards hold state",
        )
    if ask.role is Role.WORKER and ask.index is not None and 0 < workers <= ask.index:
        raise InvalidRequest(
            f"the job has {workers} worker{'s' if workers > 1 else ''}, and none has rank {ask.index}",
            expected=f"a rank from 0 to {workers - 1}" if workers > 1 else "rank 0",
            actual=f"rank {ask.index}",
            remedy="correct PS_RANK; or begin a job with --workers "
            f"{ask.index + 1}, or with --workers 0, where workers come and go",
        )
    if ask.role is Role.STANDBY and (ask.index is None or not ask.directory):
        raise InvalidRequest("a standby joins with the number of its shard and the name of its data directory")
    if ask.role is Role.SHARD and (ask.index is None or not ask.address):
        raise InvalidRequest("a shard joins with its number and the address at which it serves")
    if ask.role not in (Role.SHARD, Role.STANDBY) or ask.index is None:
        return
    if ask.index >= (_MOST_SHARDS if ask.adds(shards) else shards):
        raise UnknownShard(
            f"the cluster has no shard {ask.index}",
            shard=str(ask.index),
            expected=f"0 to {shards - 1}" if shards > 1 else "0",
            remedy="use a number in that range, add it to the running job with ps-server --add, or begin a job with "
            f"ps-coordinator --shards {ask.index + 1}"
            if ask.index < _MOST_SHARDS
            else "use a number in that range, or the next one with ps-server --add",
        )


def check_vacant(ask: Applicant, holder: Applicant | None, held: str) -> None:
    """Raises NotReady or PlaceTaken when ``ask`` is not to take its place from ``holder``, a member.

    It may when it proves that the holder is dead: the holder's directory is in its hands, whose lock one process has at
    a time, or one supervisor started both. ``held``: for how long, and when it was heard of, in words.
    """
    if holder is None or (ask.directory and holder.directory == ask.directory):
        return
    if ask.role is Role.STANDBY or ask.yields:
        raise NotReady(
            f"{ask.role.value} {ask.index} is there already: {holder.host}, process {holder.pid}",
            shard=str(ask.index),
            expected="a place nobody holds",
            remedy="wait until it is lost",
        )
    if ask.take_over or (ask.lineage and holder.lineage == ask.lineage):
        return
    where = f"{holder.host or 'an unknown host'}, process {holder.pid}"
    shard = ask.role is Role.SHARD
    raise PlaceTaken(
        f"{ask.role.value} {ask.index} is held by another process: {where}" + (f", at {holder.address}" * shard),
        shard=str(ask.index) if shard else "",
        expected="a place that nobody holds, or proof that its holder is dead: the same --data-dir"
        if shard
        else "a rank that nobody holds",
        actual=held,
        remedy=f"give this process another {'--shard' if shard else 'PS_RANK'}, or end that one; "
        f"{'--take-over' if shard else 'PS_TAKE_OVER=1'} takes the place from it",
    )


def check_free_rank(workers: int, live: Collection[int]) -> None:
    """Raises PlaceTaken when each rank of a job with that many ``workers`` is held; 0: they come and go."""
    if workers and all(rank in live for rank in range(workers)):
        raise PlaceTaken(
            f"the job has {workers} worker{'s' if workers > 1 else ''}, and all of them are there",
            expected="a rank that nobody holds",
            actual=f"one more worker than --workers {workers}",
            remedy=f"begin a job with --workers {workers + 1}, or with --workers 0, where workers come and go",
        )


def check_state(ask: Applicant, newest: int, copies: Copies) -> None:
    """Raises when ``ask`` brings older state than incarnation ``newest`` wrote for its place, to ``copies``.

    NotReady for one that yields, else Fenced. A process without state may take any place unless it yields: what it
    holds cannot be mistaken for the newest.
    """
    if ask.yields and newest and not ask.data_incarnation:
        raise NotReady(
            f"this process holds no state of shard {ask.index}, and others do",
            shard=str(ask.index),
            expected=f"state of incarnation {newest}",
            remedy="start a process that holds it, or this one without --standby to begin with nothing",
        )
    if newest and ask.data_incarnation == newest and copies.writer and not copies.include(ask.directory):
        raise (NotReady if ask.yields else Fenced)(
            f"this process may lack pushes to shard {ask.index} that were acknowledged",
            shard=str(ask.index),
            expected=f"data directory {copies.writer}" + (f" or {copies.standby}" if copies.standby else ""),
            actual=f"data directory {ask.directory or 'unknown'}",
            remedy="start the process that held the place last; this one follows it with --standby",
        )
    if 0 < ask.data_incarnation < newest:
        raise (NotReady if ask.yields else Fenced)(
            f"{ask.role.value} {ask.index} has newer state elsewhere than this process brings",
            shard=str(ask.index),
            expected=f"state of incarnation {newest}",
            actual=f"state of incarnation {ask.data_incarnation}",
            remedy="run this process as --standby, which follows the newer state, or remove its data directory",
        )
