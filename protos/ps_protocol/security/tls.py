"""Credentials of gRPC and contexts of ``ssl`` from certificate files, always as the files are now."""

from __future__ import annotations

import datetime
import os
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from ps_protocol.errors import ConfigError
from ps_protocol.security.certificates import CertificateFacts, check_pair, read_certificates, shown
from ps_protocol.security.files import LoadedFiles, WatchedFiles, read_public, read_secret
from ps_protocol.security.settings import SecuritySettings

_SUITES = "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256"


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """The contents of the files, checked against each other."""

    authorities: bytes
    certificate: bytes | None
    key: bytes | None = field(repr=False)
    #: Of ``certificate``, with those it is chained to.
    facts: tuple[CertificateFacts, ...] = ()
    #: Of ``authorities``.
    authority_facts: tuple[CertificateFacts, ...] = ()

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For ``secure_channel``."""
        return grpc.ssl_channel_credentials(self.authorities, self.key, self.certificate)

    def server_configuration(self) -> Any:
        """For the connections that a server of gRPC takes from now on."""
        pair = self.key or b"", self.certificate or b""
        return grpc.ssl_server_certificate_configuration([pair], self.authorities)

    def context(self, *, server: bool, require_client: bool = False) -> ssl.SSLContext:
        """TLS 1.3. Raises ssl.SSLError, ValueError for files that OpenSSL does not take."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if hasattr(context, "set_ciphersuites"):  # Python 3.15
            context.set_ciphersuites(_SUITES)
        context.load_verify_locations(cadata=self.authorities.decode("ascii"))
        if server and require_client:
            context.verify_mode = ssl.CERT_REQUIRED
        if self.certificate and self.key:
            _load_chain(context, self.certificate, self.key)
        return context


class TlsFiles:
    """The certificate, key and authorities of one process. Any thread may ask."""

    def __init__(self, settings: SecuritySettings) -> None:
        """Raises ConfigError, naming the file and what is wrong with it."""
        self._settings = settings
        named = [path for path in (settings.tls_ca, settings.tls_cert, settings.tls_key) if path]
        self._files = WatchedFiles(named, lambda: _load(settings))
        self._lock = threading.Lock()
        #: For servers and for clients: the newest context, and the files that it was made from.
        self._contexts: dict[bool, tuple[LoadedFiles[TlsMaterial], ssl.SSLContext]] = {}

    def current(self) -> LoadedFiles[TlsMaterial]:
        """The current content of the files."""
        return self._files.current()

    def held(self) -> tuple[tuple[str, CertificateFacts], ...]:
        """The certificate of this process with those it is chained to, and the authority of it that ends last, each
        with its name for messages.
        """
        material, settings = self.current().value, self._settings
        issuer = material.facts[-1].issuer if material.facts else None
        signers = [each for each in material.authority_facts if each.subject == issuer]
        last = max(signers or material.authority_facts, key=lambda each: each.not_after)
        own = [(f"the certificate in {settings.tls_cert}", each) for each in material.facts]
        return (*own, (f"the authority in {settings.tls_ca}", last))

    def expired(self) -> str:
        """The first of ``held`` that has expired, in words; empty: none has."""
        now = datetime.datetime.now(datetime.UTC)
        ended = ((what, each.not_after) for what, each in self.held() if now > each.not_after)
        return next((f"{what} of this process has expired on {shown(moment)}" for what, moment in ended), "")

    def server_credentials(self) -> grpc.ServerCredentials:
        """For ``add_secure_port``; each new connection gets the newest certificate."""
        served = self.current()

        def fetch() -> Any:
            nonlocal served
            newest = self.current()
            if newest.generation <= served.generation:
                return None
            served = newest
            return newest.value.server_configuration()

        first = served.value.server_configuration()
        return grpc.dynamic_ssl_server_credentials(first, fetch, self._settings.require_client)

    def client_context(self, protocols: Sequence[str] = ()) -> ssl.SSLContext:
        """For a connection that is opened now: TLS 1.3, the server's name and authority are checked."""
        if not protocols:
            return self._context(server=False)
        context = self.current().value.context(server=False)
        context.set_alpn_protocols(list(protocols))
        return context

    def server_context(self, *, asks: bool = False) -> ssl.SSLContext:
        """For a listener, once: every handshake uses the files as they are then.

        ``asks``: a client may do without the certificate that others have to show.
        """
        context = self.current().value.context(server=True, require_client=self._settings.require_client)
        if asks and context.verify_mode is ssl.CERT_REQUIRED:
            context.verify_mode = ssl.CERT_OPTIONAL

        def newest(connection: ssl.SSLObject, name: str | None, initial: ssl.SSLContext) -> None:
            connection.context = self._context(server=True)

        context.sni_callback = newest  # called for clients that send no name, too
        return context

    def _context(self, server: bool) -> ssl.SSLContext:
        with self._lock:
            files, known = self.current(), self._contexts.get(server)
            if known is None or known[0].generation != files.generation:
                context = files.value.context(server=server, require_client=self._settings.require_client)
                known = self._contexts[server] = files, context
            return known[1]


def _load_chain(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    # ssl reads them from files alone; the ones given may be half replaced by now. This one has no name on a disk.
    with os.fdopen(os.memfd_create("tls"), "wb") as both:
        both.write(key + b"\n" + certificate)
        both.flush()
        context.load_cert_chain(f"/proc/self/fd/{both.fileno()}")


def _load(settings: SecuritySettings) -> TlsMaterial:
    if settings.tls_ca is None or (settings.tls_cert is None) != (settings.tls_key is None):
        missing = "--tls-ca" if settings.tls_ca is None else "--tls-cert" if settings.tls_cert is None else "--tls-key"
        raise ConfigError(
            f"TLS needs {missing}, too",
            expected="--tls-ca, and --tls-cert with --tls-key where a certificate is shown",
            remedy=f"give {missing} or PS_{missing[2:].replace('-', '_').upper()}; psctl certs init makes all files",
        )
    authorities = read_public(settings.tls_ca, "the certificates of the authorities,")
    known = read_certificates(authorities, str(settings.tls_ca))
    # One of several may have expired: they are replaced one by one.
    if len(known) == 1:
        known[0].check_time(f"the authority in {settings.tls_ca}")
    if settings.tls_cert is None or settings.tls_key is None:
        return _checked(TlsMaterial(authorities, None, None, (), tuple(known)), settings)
    certificate = read_public(settings.tls_cert, "the certificate")
    key = read_secret(settings.tls_key, "the key")
    facts = read_certificates(certificate, str(settings.tls_cert))
    facts[0].check_time(f"the certificate in {settings.tls_cert}")
    check_pair(facts[0], key, Path(settings.tls_cert), Path(settings.tls_key))
    return _checked(TlsMaterial(authorities, certificate, key, tuple(facts), tuple(known)), settings)


def _checked(material: TlsMaterial, settings: SecuritySettings) -> TlsMaterial:
    """``material``, which OpenSSL takes. Raises ConfigError."""
    try:
        material.context(server=False)
    except (ssl.SSLError, ValueError) as error:
        named = ", ".join(str(path) for path in (settings.tls_ca, settings.tls_cert, settings.tls_key) if path)
        raise ConfigError(
            f"OpenSSL does not take {named}: {error}", remedy="replace them: psctl certs init --renew"
        ) from error
    return material


def check_server(settings: SecuritySettings) -> None:
    """Raises ConfigError unless the settings have what a server shows."""
    if settings.tls_cert is None:
        raise ConfigError(
            "a server with TLS needs a certificate",
            expected="--tls-cert, --tls-key and --tls-ca",
            actual="--tls-ca alone" if settings.tls_ca else "--tls-key alone",
            remedy="give --tls-cert and --tls-key; psctl certs init makes all files",
        )
