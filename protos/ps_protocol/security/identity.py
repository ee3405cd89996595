"""Who a caller is: the identities that certificates and tokens name, and what a call has proven."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ps_protocol.cluster.view import Role
from ps_protocol.errors import Unauthenticated
from ps_protocol.security.roles import AccessRole

SCHEME = "torch-ps:"
"""Begins the URI in a certificate's subject alternative name that names its holder."""

_NAME = r"[\w.-]{1,100}"
_FORMS = (
    (re.compile(rf"shard/(?P<job>{_NAME})/(?P<shard>\d{{1,9}})"), AccessRole.SERVER),
    (re.compile(rf"coordinator/(?P<job>{_NAME})"), AccessRole.SERVER),
    (re.compile(rf"(?P<role>admin|worker|reader|viewer)/(?P<name>{_NAME})"), None),
)


@dataclass(frozen=True, slots=True)
class CertificateIdentity:
    """The parts of a URI such as torch-ps:shard/<job>/<n>, torch-ps:coordinator/<job> or torch-ps:worker/<name>."""

    text: str
    role: AccessRole
    #: Of servers.
    job: str = ""
    #: Of a shard and its standby.
    shard: int | None = None

    @classmethod
    def parse(cls, uri: str) -> CertificateIdentity | None:
        """None for a URI that names no holder, or in no known form."""
        if not uri.startswith(SCHEME):
            return None
        text = uri.removeprefix(SCHEME)
        for form, role in _FORMS:
            if match := form.fullmatch(text):
                parts = match.groupdict()
                number = parts.get("shard")
                return cls(
                    text,
                    role or AccessRole(parts["role"]),
                    parts.get("job") or "",
                    None if number is None else int(number),
                )
        return None

    @classmethod
    def first(cls, uris: Iterable[str]) -> CertificateIdentity | None:
        """The first of ``uris`` that names a holder."""
        return next((found for uri in uris if (found := cls.parse(uri)) is not None), None)


class SessionEnded(Unauthenticated):
    """The token that a session was made with is none of this server's."""


@dataclass(frozen=True, slots=True)
class SessionClaims:
    """The claims of a session token: one membership of one process, and what its credential allowed when it joined."""

    #: Fingerprint of the key that signed it.
    job: str
    #: None: the coordinator.
    role: Role | None
    index: int
    incarnation: int
    access: frozenset[AccessRole]
    #: Seconds since 1970.
    expires: float
    #: Digest of the access token that it was made with; empty: it was made with a certificate alone.
    token_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Caller:
    """What one call has proven. Made by the server's interceptor, one per call."""

    roles: frozenset[AccessRole]
    #: For log lines and messages, printable.
    name: str
    #: The roles of its token and its certificate, without those of its session.
    proven: frozenset[AccessRole] = frozenset()
    certificate: CertificateIdentity | None = None
    session: SessionClaims | None = None
    #: Of the token that a session made for this call ends with; empty: none.
    token_digest: bytes = b""
    #: Of every token that has to stay valid for what the call may do: its own, and the one of its session.
    token_digests: frozenset[bytes] = frozenset()
