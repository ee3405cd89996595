"""Decides who a caller is from what its call shows: a session, a token, a certificate."""

from __future__ import annotations

import datetime
import time

from ps_protocol.errors import Unauthenticated, Unavailable
from ps_protocol.security.certificates import CertificateFacts, facts_in, shown
from ps_protocol.security.credentials import secret_of
from ps_protocol.security.identity import Caller, CertificateIdentity, SessionClaims, SessionEnded
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.session import SessionVerifier
from ps_protocol.security.tokens import TokenFile

now = time.time
"""Seconds since 1970."""

_REMEDY = "give --token-file or PS_TOKEN_FILE with a token that this server knows, or a certificate that names a role"


def caller_of(
    tokens: TokenFile | None,
    authorization: str,
    certificate: bytes,
    session: bytes,
    verifier: SessionVerifier | None,
    job: str,
    *,
    verified: bool = False,
) -> Caller:
    """The caller, with the roles of everything it shows. Raises Unauthenticated where something of it is wrong, or
    nothing is there; SessionEnded for a session whose token is gone; Unavailable for one that cannot be verified yet.

    ``verified``: this connection was opened with a handshake that verified ``certificate``, which admits all its calls
    for as long as it stands.
    """
    roles: set[AccessRole] = set()
    names: list[str] = []
    identity: CertificateIdentity | None = None
    claims: SessionClaims | None = None
    digest = b""
    facts = facts_in(certificate) if certificate else None
    if facts and not verified:
        check_expiry(facts)
    if facts and (identity := facts.identity) is not None:
        if identity.job not in ("", job):
            raise Unauthenticated(
                "the certificate is of another job", expected=f"job {job}", actual=identity.text, remedy="correct --job"
            )
        roles.add(identity.role)
        names.append(f"certificate {identity.text}")
    # A server without tokens goes by certificates.
    if authorization and tokens:
        token = tokens.find(secret_of(authorization))
        if token is None:
            raise Unauthenticated("this server does not know the token", remedy=_REMEDY)
        roles.add(token.role)
        digest = token.digest
        names.append(f"token {token.name}")
    proven = frozenset(roles)
    if session:
        if verifier is None:
            raise Unavailable("this server has not joined its job yet", remedy="try again")
        claims = verifier.verify(session)
        roles |= claims.access
        names.append(f"{claims.role.value} {claims.index}" if claims.role else "the coordinator")
    digests = _digests(digest, proven, claims)
    if tokens and not all(map(tokens.has, digests)):
        raise SessionEnded(
            f"the token that the session of {names[-1]} was made with is not in the token file of this server",
            remedy="it was removed, or is not there yet: join with another one, or give all servers the same tokens",
        )
    if not roles:
        seen = "its certificate names no role" if certificate else "the call has no token"
        raise Unauthenticated(f"this server answers callers with a role alone, and {seen}", remedy=_REMEDY)
    made_with = claims.token_digest if claims and claims.token_digest in digests else digest
    return Caller(frozenset(roles), ", ".join(names), proven, identity, claims, made_with, digests)


def _digests(own: bytes, proven: frozenset[AccessRole], claims: SessionClaims | None) -> frozenset[bytes]:
    """Of the tokens that a call depends on. A token of its own that allows all that its session does stands for the
    one that the session was made with: a member whose token was replaced shows both.
    """
    replaced = own and claims and claims.access <= proven
    made_with = claims.token_digest if claims and not replaced else b""
    return frozenset({own, made_with} - {b""})


def check_expiry(certificate: CertificateFacts) -> None:
    """Raises Unauthenticated when ``certificate`` is not valid any more."""
    if datetime.datetime.fromtimestamp(now(), datetime.UTC) > certificate.not_after:
        raise Unauthenticated(
            f"the certificate of the caller has expired on {shown(certificate.not_after)}",
            remedy="replace it: psctl certs init --renew",
        )


def check_proof(caller: Caller, tokens: TokenFile | None) -> None:
    """Raises Unauthenticated when a token that ``caller`` depends on was removed. Its certificate was verified when the
    connection was opened, and a session ends with the membership.
    """
    if tokens and not all(map(tokens.has, caller.token_digests)):
        raise Unauthenticated("the token of the caller was removed", remedy=_REMEDY)
