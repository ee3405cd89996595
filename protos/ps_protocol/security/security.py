"""``Security``: the one object that every listener and every dialler of a process takes."""

from __future__ import annotations

import ssl
import threading
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import grpc

from ps_protocol.errors import PermissionDenied, PsError, Unauthenticated, Unavailable
from ps_protocol.security.binding import check_bind
from ps_protocol.security.credentials import OwnTokens, SessionCredential, ShownCredentials
from ps_protocol.security.identity import Caller
from ps_protocol.security.roles import AccessRole, listed
from ps_protocol.security.settings import SecuritySettings
from ps_protocol.security.tokens import TokenFile

if TYPE_CHECKING:
    from ps_protocol.security.certificates import CertificateFacts
    from ps_protocol.security.session import SessionVerifier
    from ps_protocol.security.tls import TlsFiles

EVERYBODY = Caller(frozenset(AccessRole), "anybody", frozenset(AccessRole))
"""The caller where nobody is authenticated."""


class CredentialsReplaced(Unavailable):
    """A call was refused for what it had shown, and there is something newer to show: it may be repeated."""


class RefusedCalls:
    """How many calls were refused, by reason: "unauthenticated" or "permission". Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, error: PsError) -> None:
        """Count one refusal."""
        with self._lock:
            self._counts["unauthenticated" if isinstance(error, Unauthenticated) else "permission"] += 1

    @property
    def counts(self) -> Mapping[str, int]:
        """Both reasons, always."""
        with self._lock:
            return {reason: self._counts[reason] for reason in ("unauthenticated", "permission")}


class Security:
    """TLS and tokens of one process, from files that are read again when they change. Any thread may use it."""

    def __init__(self, settings: SecuritySettings, role: AccessRole, *, listens: bool = False) -> None:
        """``role``: what this process is to others. ``listens``: it has servers, which need a certificate.

        Raises ConfigError, naming the file, and what is wrong with it: missing, open to others, no certificate or key,
        not a pair, expired on a date, a line that is no token.
        """
        self.settings = settings
        self.role = role
        self.refused = RefusedCalls()
        self._files = _tls_files(settings, listens) if settings.tls else None
        self._tokens = TokenFile(settings.token_file) if settings.token_file else None
        self._own = OwnTokens(settings, role, self._tokens)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], role: AccessRole, *, listens: bool = False) -> Security:
        """From ``PS_TLS_CERT``, ``PS_TOKEN_FILE`` and so on. Raises ConfigError."""
        return cls(SecuritySettings.from_environment(environ), role, listens=listens)

    @classmethod
    def off(cls) -> Security:
        """Without TLS, without tokens: for loopback."""
        return OFF

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return self._files is not None

    @property
    def authenticates(self) -> bool:
        """Whether servers refuse callers who prove nothing."""
        return self.settings.authenticates

    @property
    def reflects(self) -> bool:
        """Whether servers describe their services to tools: as set, else unless callers are authenticated."""
        told = self.settings.reflection
        return not self.authenticates if told is None else told

    @property
    def sends_nothing(self) -> bool:
        """Whether a plain channel does: no TLS, and no token to send."""
        return self._files is None and self._own.token is None

    @property
    def certificate_expiry(self) -> float | None:
        """When this process's certificate ends to be valid, in seconds since 1970; None without one."""
        facts = self._files.current().value.facts if self._files else ()
        return min((each.not_after.timestamp() for each in facts), default=None)

    @property
    def held_certificates(self) -> tuple[tuple[str, CertificateFacts], ...]:
        """The certificate of this process with those it is chained to, and the authority of it that ends last, each
        with its name for messages.
        """
        return self._files.held() if self._files else ()

    # TLS

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Of a gRPC server; None without TLS. Files that change are used from the next connection on."""
        return self._files.server_credentials() if self._files else None

    def server_context(self, *, asks: bool = False) -> ssl.SSLContext | None:
        """Of a listener, TLS 1.3; None without TLS. Each handshake uses the files as they are then.

        ``asks``: where clients have to show a certificate, these may, and prove who they are otherwise.
        """
        return self._files.server_context(asks=asks) if self._files else None

    def client_context(self, *protocols: str) -> ssl.SSLContext | None:
        """Of a connection that is opened now, TLS 1.3; None without TLS. Names of servers are checked.

        ``protocols``: those of ALPN.
        """
        return self._files.client_context(protocols) if self._files else None

    def check_bind(self, host: str, what: str) -> None:
        """Raises ConfigError when ``what`` would listen on ``host``, beyond loopback, without TLS or without tokens."""
        check_bind(self.settings, host, what)

    # What this process shows

    def show(self, session: SessionCredential | None = None) -> ShownCredentials:
        """What a call that begins now shows."""
        files = self._files.current() if self._files else None
        return ShownCredentials(files, self._own.token, session.token if session else b"")

    def explain(self, error: PsError, shown: ShownCredentials, session: SessionCredential | None = None) -> PsError:
        """``error`` of a call that had ``shown``, with what it was that the server refused.

        CredentialsReplaced in place of Unauthenticated where this process has something newer to show, or its files
        are being replaced. Unavailable names a certificate of this process that has expired: servers end connections
        that show it without a word.
        """
        if isinstance(error, Unavailable) and self._files and not error.actual:
            error.actual = self._files.expired()
        if not isinstance(error, Unauthenticated | PermissionDenied):
            return error
        if isinstance(error, Unauthenticated) and self._is_outdated(shown, self.show(session)):
            return CredentialsReplaced(
                f"{error.message}; certificates or tokens of this process are being replaced",
                shard=error.shard,
                remedy="try again; if this goes on, see in the log which file is not taken",
            )
        error.actual = error.actual or self._described(shown)
        return error

    def _is_outdated(self, shown: ShownCredentials, now: ShownCredentials) -> bool:
        if self._own.outdated or (now.token, now.session) != (shown.token, shown.session):
            return True
        if now.files is None or shown.files is None:
            return False
        return now.files.outdated or now.files.generation != shown.files.generation

    def _described(self, shown: ShownCredentials) -> str:
        settings, named = self.settings, []
        if token := shown.token:
            where = "PS_TOKEN" if settings.token else f"{settings.token_file}"
            named.append(f"the token '{token.name}' of role {token.role.value} in {where}")
        if settings.tls_cert:
            named.append(f"the certificate {settings.tls_cert}")
        return " and ".join(named) or "no token and no certificate: give --token-file or PS_TOKEN_FILE"

    # What others show

    def authenticate(
        self,
        *,
        authorization: str = "",
        certificate: bytes = b"",
        session: bytes = b"",
        verifier: SessionVerifier | None = None,
        verified: bool = False,
    ) -> Caller:
        """Who calls. ``authorization``: the header; ``certificate``: of the peer, PEM, verified in a handshake;
        ``session`` is verified by ``verifier``. ``verified``: that handshake opened this very connection; without it
        the certificate has to be valid now.

        Raises Unauthenticated for a call that proves nothing, and for one with a wrong or expired proof.
        """
        if not self.authenticates:
            return EVERYBODY
        # Of what security needs this alone is slow to import.
        from ps_protocol.security.callers import caller_of

        job = self.settings.job
        return caller_of(self._tokens, authorization, certificate, session, verifier, job, verified=verified)

    def check_proof(self, caller: Caller) -> None:
        """Raises Unauthenticated when ``caller``, which was admitted once, may not go on: its token was removed."""
        if self.authenticates:
            from ps_protocol.security.callers import check_proof

            check_proof(caller, self._tokens)

    def authorize(self, caller: Caller, roles: frozenset[AccessRole] | None, what: str) -> None:
        """Raises PermissionDenied unless one of the caller's roles is among ``roles``; None: everybody may."""
        if roles is None or caller.roles & roles:
            return
        raise PermissionDenied(
            f"{what} needs the role {listed(roles)}" if roles else f"{what} is open to nobody",
            expected=listed(roles),
            actual=f"{caller.name}, with the role {listed(caller.roles) or 'of nobody'}",
            remedy="use a token or certificate of such a role",
        )


def _tls_files(settings: SecuritySettings, listens: bool) -> TlsFiles:
    from ps_protocol.security.tls import TlsFiles, check_server

    if listens:
        check_server(settings)
    return TlsFiles(settings)


OFF = Security(SecuritySettings(), AccessRole.WORKER)
"""Without TLS, without tokens."""
