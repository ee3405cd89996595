"""Decides whether a process may become a member at all: protocol version, token, shard number, age of its state."""

from __future__ import annotations

from dataclasses import dataclass

from ps_protocol import PROTOCOL_VERSION
from ps_protocol.errors import Fenced, InvalidRequest, ProtocolVersionMismatch, UnknownShard
from ps_protocol.view import Role

_HIGHEST_INCARNATION = 1 << 62
"""Far above any real one; what a process brings must leave room for those that follow it."""


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


def check_applicant(ask: Applicant, shards: int) -> None:
    """Raises ProtocolVersionMismatch, InvalidRequest, or UnknownShard for a number that is none of ``shards``."""
    if ask.protocol_version != PROTOCOL_VERSION:
        raise ProtocolVersionMismatch(
            f"the {ask.role.value} speaks protocol version {ask.protocol_version}, the coordinator {PROTOCOL_VERSION}",
            expected=str(PROTOCOL_VERSION),
            actual=str(ask.protocol_version),
            remedy="install the same torch-ps on both sides",
        )
    if not ask.token:
        raise InvalidRequest("a join needs a token", expected="a random text, the same in every repetition")
    if not 0 <= ask.data_incarnation <= (_HIGHEST_INCARNATION if ask.role is Role.SHARD else 0):
        raise InvalidRequest(
            f"a {ask.role.value} cannot hold state of incarnation {ask.data_incarnation}",
            expected=f"0 to {_HIGHEST_INCARNATION}" if ask.role is Role.SHARD else "0: only shards hold state",
        )
    if ask.role is not Role.SHARD:
        return
    if ask.index is None or not ask.address:
        raise InvalidRequest("a shard joins with its number and the address at which it serves")
    if ask.index >= shards:
        raise UnknownShard(
            f"the cluster has no shard {ask.index}",
            shard=str(ask.index),
            expected=f"0 to {shards - 1}" if shards > 1 else "0",
            remedy=f"use a number in that range, or start the coordinator with --shards {ask.index + 1}",
        )


def check_state(ask: Applicant, newest: int) -> None:
    """Raises Fenced when ``ask`` brings state that is older than what incarnation ``newest`` wrote for its place.

    A process without state may take any place: what it holds cannot be mistaken for the newest.
    """
    if 0 < ask.data_incarnation < newest:
        raise Fenced(
            f"{ask.role.value} {ask.index} has newer state elsewhere than this process brings",
            shard=str(ask.index),
            expected=f"state of incarnation {newest}",
            actual=f"state of incarnation {ask.data_incarnation}",
            remedy="run this process as --standby, which follows the newer state, or remove its data directory",
        )
