"""Decides who gets a session token: members whose lasting credential, token or certificate, allows their role."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ps_protocol.cluster.view import Member, Role
from ps_protocol.errors import PermissionDenied
from ps_protocol.security.credentials import SessionCredential
from ps_protocol.security.identity import Caller
from ps_protocol.security.roles import JOINING, AccessRole, listed

if TYPE_CHECKING:
    from ps_protocol.security.session import SessionSigner


class CoordinatorSession(SessionCredential):
    """The coordinator's credential for shards: a token like a member's, signed by the coordinator itself."""

    def __init__(self, issuer: SessionIssuer) -> None:
        self._issuer = issuer

    @property
    def token(self) -> bytes:  # type: ignore[override]
        """A token with a limited lifetime."""
        return self._issuer.own()


class SessionIssuer:
    """Owned by the coordinator. Without a signer it issues no tokens, and every caller may join."""

    def __init__(self, signer: SessionSigner | None = None) -> None:
        self._signer = signer
        self.credential: SessionCredential = CoordinatorSession(self) if signer else SessionCredential()

    @property
    def public_key(self) -> bytes:
        """Verifies the tokens; empty without a signer."""
        return self._signer.public_key if self._signer else b""

    def own(self) -> bytes:
        """A token for the coordinator itself."""
        return self._signer.sign(None, frozenset({AccessRole.SERVER})) if self._signer else b""

    def check_joining(self, caller: Caller, role: Role, index: int | None) -> None:
        """Raises PermissionDenied unless ``caller`` may join as ``role`` and its certificate allows this ``index``.

        A certificate of a shard is for that shard and its standby alone.
        """
        if self._signer is None:
            return
        roles = JOINING[role]
        if not caller.proven & roles:
            raise PermissionDenied(
                f"joining as {role.value} needs the role {listed(roles)}",
                expected=listed(roles),
                actual=f"{caller.name}, with the role {listed(caller.proven)}",
                remedy="use a token or certificate of such a role",
            )
        named = caller.certificate
        if named and named.role is AccessRole.SERVER and named.shard != index:
            raise PermissionDenied(
                f"this certificate is not that of {role.value} {index}",
                expected=f"shard/{named.job}/{index}",
                actual=named.text,
                remedy="give each shard its own certificate: psctl certs init --shards",
            )

    def issue(self, caller: Caller, member: Member) -> bytes:
        """A token for ``member``, at its Join and with each heartbeat; empty without a signer.

        It allows what the call's lasting credential allows: a withdrawn one is not renewed. It expires with the call's
        token, or with the session's if the call has none.
        """
        access = caller.proven & JOINING[member.role]
        return self._signer.sign(member, access, caller.token_digest) if self._signer and access else b""
