"""Session tokens: a membership of one process, signed by the coordinator, verified by every server by itself."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ps_protocol import times
from ps_protocol.cluster.view import Member, Role
from ps_protocol.errors import DamagedData, Unauthenticated
from ps_protocol.security.credentials import SIGNATURE_BYTES
from ps_protocol.security.files import read_secret
from ps_protocol.security.identity import SessionClaims
from ps_protocol.security.roles import AccessRole

_CONTEXT = b"torch-ps session 1\0"
_KEY_BYTES = 32
_LONGEST = 4096


class SessionSigner:
    """Owned by the coordinator. After a restart with the same key all sessions are still valid."""

    def __init__(self, key: Ed25519PrivateKey | None = None, clock: Callable[[], float] = time.time) -> None:
        """Without ``key`` a new one is made. ``clock``: seconds since 1970."""
        self._key = key or Ed25519PrivateKey.generate()
        self._clock = clock
        self.public_key = self._key.public_key().public_bytes_raw()
        self._job = _fingerprint(self.public_key)

    @property
    def private_key(self) -> bytes:
        """32 bytes, secret."""
        return self._key.private_bytes_raw()

    @classmethod
    def read(cls, path: Path) -> SessionSigner:
        """With the key of a file that only its owner may read. Raises ConfigError, DamagedData."""
        data = read_secret(path, "the key of sessions")
        if len(data) != _KEY_BYTES:
            raise DamagedData(
                f"{path} has no key of sessions",
                expected=f"{_KEY_BYTES} bytes",
                actual=f"{len(data)} bytes",
                remedy="remove it; members that run then join again",
            )
        return cls(Ed25519PrivateKey.from_private_bytes(data))

    def sign(self, member: Member | None, access: frozenset[AccessRole], token_digest: bytes = b"") -> bytes:
        """A token for ``member``; None: for the coordinator itself. ``token_digest``: of the access token that it was
        made with, and ends with; empty: a certificate alone.
        """
        claims = {
            "job": self._job,
            "role": member.role.value if member else "",
            "index": member.index if member else 0,
            "incarnation": member.incarnation if member else 0,
            "access": sorted(role.value for role in access),
            "token": token_digest.hex(),
            "expires": self._clock() + times.SESSION_SECONDS,
        }
        payload = json.dumps(claims, separators=(",", ":")).encode()
        return self._key.sign(_CONTEXT + payload) + payload


class SessionVerifier:
    """Knows the public key of one job."""

    def __init__(self, public_key: bytes, clock: Callable[[], float] = time.time) -> None:
        """Raises Unauthenticated for bytes that are no key."""
        try:
            self._key = Ed25519PublicKey.from_public_bytes(public_key)
        except ValueError as error:
            raise Unauthenticated("the coordinator sent no key of sessions", remedy="see its log") from error
        self._job = _fingerprint(public_key)
        self._clock = clock

    def verify(self, token: bytes) -> SessionClaims:
        """The claims of ``token``. Raises Unauthenticated for one of another job, a forged or an expired one."""
        signature, payload = token[:SIGNATURE_BYTES], token[SIGNATURE_BYTES:_LONGEST]
        try:
            self._key.verify(signature, _CONTEXT + payload)
        except InvalidSignature:
            raise Unauthenticated(
                "the session token is not one of this job", remedy="join again: start this process again"
            ) from None
        claims = _claims(payload)
        if claims.job != self._job:
            raise Unauthenticated("the session token is of another job", remedy="join again: start this process again")
        if self._clock() > claims.expires + times.CLOCK_SECONDS:
            moment = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(claims.expires))
            raise Unauthenticated(
                f"the session token has expired on {moment}",
                remedy="heartbeats renew it: see whether the coordinator answers, and the clocks of both hosts",
            )
        return claims


def _claims(payload: bytes) -> SessionClaims:
    """Of a payload whose signature is right. Raises Unauthenticated for one of another version."""
    try:
        said = json.loads(payload)
        claims = SessionClaims(
            str(said["job"]),
            Role(said["role"]) if said["role"] else None,
            int(said["index"]),
            int(said["incarnation"]),
            frozenset(AccessRole(role) for role in said["access"]),
            float(said["expires"]),
            bytes.fromhex(said["token"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise Unauthenticated(
            "the session token is of another version", remedy="use the same torch-ps on both sides"
        ) from error
    return claims


def _fingerprint(public_key: bytes) -> str:
    return hashlib.sha256(public_key).hexdigest()[:16]
