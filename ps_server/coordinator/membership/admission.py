"""Decides whether a process is admitted: protocol version, token, shard number, and the state it brings."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ps_protocol import PROTOCOL_VERSION
from ps_protocol.cluster.scaling import MOST_RANKS
from ps_protocol.cluster.view import JoinRequest, Member, Role
from ps_protocol.errors import Fenced, InvalidRequest, NotReady, PlaceTaken, ProtocolVersionMismatch, UnknownShard
from ps_server.coordinator.placement.job_limits import check_length

_HIGHEST_INCARNATION = 1 << 62
"""Far above any real incarnation, and low enough for later ones."""

MOST_SHARDS = 4096
"""A higher number is taken for a mistake: all numbers below it would be added as well."""


@dataclass(frozen=True, slots=True)
class StateCopies:
    """The data directories with the newest state of a shard."""

    #: The incarnation of the shard that wrote it.
    writer: str = ""
    #: The number of that shard's last report about its standby.
    word: int = 0
    #: The directory of the standby that has every acknowledged push; empty: none.
    standby: str = ""

    def include(self, directory: str) -> bool:
        """Whether ``directory`` is one of them."""
        return bool(directory) and directory in (self.writer, self.standby)


def check_applicant(ask: JoinRequest, shards: int, workers: int) -> None:
    """Raises ProtocolVersionMismatch, InvalidRequest, or UnknownShard for a number not in the range of ``shards``.

    A shard that is being added may have a higher number. ``workers``: the most workers; 0 for any number.
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
    if ask.role in (Role.WORKER, Role.EVALUATOR) and (ask.index or 0) >= MOST_RANKS:
        raise InvalidRequest(
            f"the number of {ask.role.value} {ask.index} is too high", expected=f"a number below {MOST_RANKS}"
        )
    if not ask.token:
        raise InvalidRequest("a join needs a token", expected="a random text, the same in every repetition")
    if not 0 <= ask.data_incarnation <= (_HIGHEST_INCARNATION if ask.role is Role.SHARD else 0):
        raise InvalidRequest(
            f"a {ask.role.value} cannot hold state of incarnation {ask.data_incarnation}",
            expected=f"0 to {_HIGHEST_INCARNATION}" if ask.role is Role.SHARD else "0: only shards hold state",
        )
    if ask.role is Role.WORKER and ask.index is not None and 0 < workers <= ask.index:
        raise InvalidRequest(
            f"the job has at most {workers} worker{'s' if workers > 1 else ''}, and there is no rank {ask.index}",
            expected=f"a rank from 0 to {workers - 1}" if workers > 1 else "rank 0",
            actual=f"rank {ask.index}",
            remedy="correct PS_RANK; or begin a job with --workers "
            f"{ask.index + 1}, with a range (--workers 1:{ask.index + 1}), or with --workers 0, where workers come and "
            "go",
        )
    if ask.role is Role.STANDBY and (ask.index is None or not ask.directory):
        raise InvalidRequest("a standby joins with the number of its shard and the name of its data directory")
    if ask.role is Role.SHARD and (ask.index is None or not ask.address):
        raise InvalidRequest("a shard joins with its number and the address at which it serves")
    if ask.role not in (Role.SHARD, Role.STANDBY) or ask.index is None:
        return
    if ask.index >= (MOST_SHARDS if ask.adds(shards) else shards):
        raise UnknownShard(
            f"the cluster has no shard {ask.index}",
            shard=str(ask.index),
            expected=f"0 to {shards - 1}" if shards > 1 else "0",
            remedy="use a number in that range, add it to the running job with ps-server --add, or begin a job with "
            f"ps-coordinator --shards {ask.index + 1}"
            if ask.index < MOST_SHARDS
            else "use a number in that range, or the next one with ps-server --add",
        )


def check_repetition(ask: JoinRequest, first: Member) -> None:
    """Raises InvalidRequest if ``ask`` has the token of ``first`` and names another place."""
    if ask.role is not first.role or ask.index not in (None, first.index):
        raise InvalidRequest(
            "this token is of the join of another place",
            expected=f"{first.role.value} {first.index}",
            actual=f"{ask.role.value} {'' if ask.index is None else ask.index}".rstrip(),
            remedy="use a random token for each process",
        )


def check_vacant(ask: JoinRequest, holder: JoinRequest | None, held: str) -> None:
    """Raises NotReady or PlaceTaken if ``ask`` may not replace the live member ``holder``.

    It may if it proves that the holder is dead: it has locked the holder's directory, or one supervisor started both.
    ``held``: describes how long the holder has been a member, and its last heartbeat.
    """
    if holder is None or (ask.directory and holder.directory == ask.directory):
        return
    if ask.role is Role.STANDBY or ask.yields:
        raise NotReady(
            f"{ask.role.value} {ask.index} exists already: {holder.host}, process {holder.pid}",
            shard=str(ask.index),
            expected="a vacant place",
            remedy="wait until that process is lost",
        )
    if ask.take_over or (ask.lineage and holder.lineage == ask.lineage):
        return
    where = f"{holder.host or 'an unknown host'}, process {holder.pid}"
    shard = ask.role is Role.SHARD
    raise PlaceTaken(
        f"{ask.role.value} {ask.index} is held by another process: {where}" + (f", at {holder.address}" * shard),
        shard=str(ask.index) if shard else "",
        expected="a vacant place, or proof that its holder is dead: the same --data-dir" if shard else "a free rank",
        actual=held,
        remedy=f"give this process another {'--shard' if shard else 'PS_RANK'}, or end that one; "
        f"{'--take-over' if shard else 'PS_TAKE_OVER=1'} takes the place from it",
    )


def check_free_rank(workers: int, live: Collection[int]) -> None:
    """Raises PlaceTaken if every rank of a job of at most ``workers`` (0: any number) is taken."""
    if workers and all(rank in live for rank in range(workers)):
        raise PlaceTaken(
            f"the job has at most {workers} worker{'s' if workers > 1 else ''}, and all of them are live",
            expected="a free rank",
            actual=f"one more worker than --workers {workers}",
            remedy=f"begin a job with --workers {workers + 1}, with a range (--workers 1:{workers + 1}), or with "
            "--workers 0, where workers come and go",
        )


def check_state(ask: JoinRequest, newest: int, copies: StateCopies) -> None:
    """Raises an error if the state in ``ask`` is older than what incarnation ``newest`` wrote to ``copies``.

    NotReady for a process that yields, else Fenced. A process without state that does not yield may take any place: it
    cannot be mistaken for one with the newest state.
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
