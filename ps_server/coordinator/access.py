"""Who may call a coordinator, and how it calls shards: its security, its sessions, and what both need of each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from ps_protocol.rpc.channel import open_async_channel
from ps_protocol.security.security import Security
from ps_server.coordinator.membership.sessions import SessionIssuer
from ps_server.coordinator.persistence.session_key import session_signer
from ps_server.serving.authorization import Authorization


@dataclass(frozen=True, slots=True)
class CoordinatorAccess:
    """One per coordinator."""

    security: Security
    sessions: SessionIssuer
    #: For its server.
    authorization: Authorization

    @classmethod
    def of(cls, security: Security, folder: Path | None = None) -> CoordinatorAccess:
        """``folder``: of the journal; sessions outlive this process with it. Raises ConfigError, DamagedData."""
        sessions = SessionIssuer(session_signer(security, folder))
        authorization = Authorization(security)
        authorization.trust(sessions.public_key)
        return cls(security, sessions, authorization)

    def open_shard(self, address: str) -> grpc.aio.Channel:
        """A channel to a shard, for calls by the coordinator."""
        return open_async_channel(address, self.security, self.sessions.credential)
