"""Decides who a caller is from what its call shows: a session, a token, a certificate."""

from __future__ import annotations

from ps_protocol.errors import Unauthenticated, Unavailable
from ps_protocol.security.certificates import identity_in
from ps_protocol.security.credentials import secret_of
from ps_protocol.security.identity import Caller, CertificateIdentity, SessionClaims
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.session import SessionVerifier
from ps_protocol.security.tokens import TokenFile

_REMEDY = "give --token-file or PS_TOKEN_FILE with a token that this server knows, or a certificate that names a role"


def caller_of(
    tokens: TokenFile | None,
    authorization: str,
    certificate: bytes,
    session: bytes,
    verifier: SessionVerifier | None,
    job: str,
) -> Caller:
    """The caller, with the roles of everything it shows. Raises Unauthenticated where something of it is wrong, or
    nothing is there; Unavailable for a session that cannot be verified yet.
    """
    roles: set[AccessRole] = set()
    names: list[str] = []
    identity: CertificateIdentity | None = None
    claims: SessionClaims | None = None
    if certificate and (identity := identity_in(certificate)) is not None:
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
        names.append(f"token {token.name}")
    proven = frozenset(roles)
    if session:
        if verifier is None:
            raise Unavailable("this server has not joined its job yet", remedy="try again")
        claims = verifier.verify(session)
        roles |= claims.access
        names.append(f"{claims.role.value} {claims.index}" if claims.role else "the coordinator")
    if not roles:
        shown = "its certificate names no role" if certificate else "the call has no token"
        raise Unauthenticated(f"this server answers callers with a role alone, and {shown}", remedy=_REMEDY)
    return Caller(frozenset(roles), ", ".join(names), proven, identity, claims)
