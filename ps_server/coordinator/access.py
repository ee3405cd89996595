"""The security of a coordinator: who may call it, and how it calls shards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from ps_protocol.files import replace_file
from ps_protocol.rpc.channel import open_async_channel
from ps_protocol.security.security import Security
from ps_server.coordinator.membership.sessions import SessionIssuer
from ps_server.serving.authorization import Authorization

if TYPE_CHECKING:
    from ps_protocol.security.session import SessionSigner

KEY_FILE = "session.key"
"""Beside the journal: a coordinator that is restarted continues with the sessions of its members."""


@dataclass(frozen=True, slots=True)
class CoordinatorAccess:
    """One per coordinator."""

    security: Security
    sessions: SessionIssuer
    #: For its server.
    authorization: Authorization

    @classmethod
    def of(cls, security: Security, folder: Path | None = None) -> CoordinatorAccess:
        """``folder``: of the journal; with it sessions survive a restart. Raises ConfigError, DamagedData."""
        sessions = SessionIssuer(_session_signer(security, folder))
        authorization = Authorization(security)
        authorization.trust(sessions.public_key)
        return cls(security, sessions, authorization)

    def open_shard(self, address: str) -> grpc.aio.Channel:
        """A channel to a shard, for calls by the coordinator."""
        return open_async_channel(address, self.security, self.sessions.credential)


def _session_signer(security: Security, folder: Path | None) -> SessionSigner | None:
    """A signer with the key in ``folder``, created if missing; without a folder, with a key for this process only.

    None if callers are not authenticated. Called with the journal locked. Raises ConfigError, DamagedData, OSError.
    """
    if not security.authenticates:
        return None
    from ps_protocol.security.session import SessionSigner

    if folder is None:
        return SessionSigner()
    path = folder / KEY_FILE
    if not path.exists():
        replace_file(path, SessionSigner().private_key)
    return SessionSigner.read(path)
