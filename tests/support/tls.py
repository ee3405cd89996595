"""TLS contexts for tests of sockets, from the authority of ``tests.support.certificates`` or another."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from ps_protocol.security.certificates import CertificateFacts
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.settings import SecuritySettings
from ps_server.certs import Authority
from tests.support.certificates import authority, write_pair

SERVER, CLIENT = "shard/job/0", "worker/alice"
LOOPBACK = ("127.0.0.1", "localhost")


class SocketCertificates:
    """Securities of a shard and of workers in one folder of a test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch

    def shard(
        self, *, by: Authority | None = None, days: float = 1.0, hosts: tuple[str, ...] = LOOPBACK, **changes: object
    ) -> Security:
        return self._security("shard", by or authority(), SERVER, hosts, days, changes)

    def worker(self, *, by: Authority | None = None, days: float = 1.0, **changes: object) -> Security:
        """``by``: who has signed its certificate; it trusts the authority of all tests, unless ``tls_ca`` is given."""
        return self._security("worker", by or authority(), CLIENT, (), days, changes)

    def anonymous(self, **changes: object) -> Security:
        """A worker without a certificate."""
        settings = SecuritySettings(tls_ca=self._ca(authority()))
        return Security(settings.with_given(**changes), AccessRole.WORKER)

    def ca_file(self, of: Authority) -> Path:
        return self._ca(of)

    def _security(
        self, name: str, by: Authority, identity: str, hosts: tuple[str, ...], days: float, changes: dict[str, object]
    ) -> Security:
        certificate, key = write_pair(
            self.folder, f"{name}-{len(list(self.folder.iterdir()))}", by.issue(identity, hosts, days)
        )
        settings = SecuritySettings(tls_cert=certificate, tls_key=key, tls_ca=self._ca(authority()))
        with self._monkeypatch.context() as lenient:
            # A process whose certificate has expired would not start: this one ran when it did.
            lenient.setattr(CertificateFacts, "check_time", lambda *_: None)
            security = Security(settings.with_given(**changes), AccessRole.WORKER, listens=bool(hosts))
            for context in (security.server_context, security.client_context):
                assert isinstance(context(), ssl.SSLContext)
        return security

    def _ca(self, of: Authority) -> Path:
        path = self.folder / f"ca-{id(of)}.pem"
        path.write_bytes(of.own.certificate)
        return path
