"""Credentials of gRPC and contexts of ``ssl`` from certificate files, always as the files are now."""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from ps_protocol.errors import ConfigError
from ps_protocol.security.certificates import CertificateFacts, check_pair, read_certificates
from ps_protocol.security.files import WatchedFiles, read_public, read_secret
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


class TlsFiles:
    """The certificate, key and authorities of one process. Any thread may ask."""

    def __init__(self, settings: SecuritySettings) -> None:
        """Raises ConfigError, naming the file and what is wrong with it."""
        self._settings = settings
        named = [path for path in (settings.tls_ca, settings.tls_cert, settings.tls_key) if path]
        self._files = WatchedFiles(named, lambda: _load(settings))
        self._lock = threading.Lock()
        self._contexts: dict[bool, tuple[int, ssl.SSLContext]] = {}

    @property
    def material(self) -> TlsMaterial:
        """What the files hold now."""
        return self._files.current()

    @property
    def generation(self) -> int:
        """Rises when the files were replaced."""
        self._files.current()
        return self._files.generation

    def server_credentials(self) -> grpc.ServerCredentials:
        """For ``add_secure_port``; each new connection gets the newest certificate."""
        known = [self._files.generation]

        def fetch() -> Any:
            material, generation = self.material, self._files.generation
            if generation == known[0]:
                return None
            known[0] = generation
            return _configuration(material)

        require = self._settings.require_client
        return grpc.dynamic_ssl_server_credentials(_configuration(self.material), fetch, require)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For ``secure_channel``, from the files as they are now."""
        material = self.material
        return grpc.ssl_channel_credentials(material.authorities, material.key, material.certificate)

    def client_context(self, protocols: Sequence[str] = ()) -> ssl.SSLContext:
        """For a connection that is opened now: TLS 1.3, the server's name and authority are checked."""
        if not protocols:
            return self._context(server=False)
        context = self._fresh(server=False)
        context.set_alpn_protocols(list(protocols))
        return context

    def server_context(self, *, asks: bool = False) -> ssl.SSLContext:
        """For a listener, once: every handshake uses the files as they are then.

        ``asks``: a client may do without the certificate that others have to show.
        """
        context = self._fresh(server=True)
        if asks and context.verify_mode is ssl.CERT_REQUIRED:
            context.verify_mode = ssl.CERT_OPTIONAL

        def newest(connection: ssl.SSLObject, name: str | None, initial: ssl.SSLContext) -> None:
            connection.context = self._context(server=True)

        context.sni_callback = newest  # called for clients that send no name, too
        return context

    def _context(self, server: bool) -> ssl.SSLContext:
        generation = self.generation
        with self._lock:
            known = self._contexts.get(server)
            if known is None or known[0] != generation:
                known = self._contexts[server] = generation, self._fresh(server)
            return known[1]

    def _fresh(self, server: bool) -> ssl.SSLContext:
        material = self.material
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if hasattr(context, "set_ciphersuites"):  # Python 3.15
            context.set_ciphersuites(_SUITES)
        context.load_verify_locations(cadata=material.authorities.decode("ascii"))
        if server and self._settings.require_client:
            context.verify_mode = ssl.CERT_REQUIRED
        if material.certificate and material.key:
            _load_chain(context, material.certificate, material.key)
        return context


def _load_chain(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    # ssl reads them from files alone; the ones given may be half replaced by now. This one has no name on a disk.
    with os.fdopen(os.memfd_create("tls"), "wb") as both:
        both.write(key + b"\n" + certificate)
        both.flush()
        context.load_cert_chain(f"/proc/self/fd/{both.fileno()}")


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    pair = material.key or b"", material.certificate or b""
    return grpc.ssl_server_certificate_configuration([pair], material.authorities)


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
        return TlsMaterial(authorities, None, None)
    certificate = read_public(settings.tls_cert, "the certificate")
    key = read_secret(settings.tls_key, "the key")
    facts = read_certificates(certificate, str(settings.tls_cert))
    facts[0].check_time(f"the certificate in {settings.tls_cert}")
    check_pair(facts[0], key, Path(settings.tls_cert), Path(settings.tls_key))
    return TlsMaterial(authorities, certificate, key, tuple(facts))


def check_server(settings: SecuritySettings) -> None:
    """Raises ConfigError unless the settings have what a server shows."""
    if settings.tls_cert is None:
        raise ConfigError(
            "a server with TLS needs a certificate",
            expected="--tls-cert, --tls-key and --tls-ca",
            actual="--tls-ca alone" if settings.tls_ca else "--tls-key alone",
            remedy="give --tls-cert and --tls-key; psctl certs init makes all files",
        )
