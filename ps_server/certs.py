"""A certificate authority for laboratories, and the folder of what it makes: a certificate for each process and role,
and tokens. Keys are on the curve P-256; secrets have mode 0600.
"""

from __future__ import annotations

import datetime
import ipaddress
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ps_protocol.cluster.job import DEFAULT_JOB
from ps_protocol.errors import ConfigError
from ps_protocol.files import make_private_folder, replace_file
from ps_protocol.security.identity import SCHEME
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.settings import SecuritySettings

AUTHORITY_DAYS = 3650.0
CERTIFICATE_DAYS = 365.0

_CLOCK = datetime.timedelta(minutes=5)
"""Certificates are valid from a little before now: clocks differ."""

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")

AUTHORITY = "ca"
COORDINATOR = "coordinator"
RELAY = "relay"
TOKENS = "tokens"

CLIENTS = (AccessRole.ADMIN, AccessRole.WORKER, AccessRole.READER, AccessRole.VIEWER)


@dataclass(frozen=True, slots=True)
class KeyedCertificate:
    """A certificate and its private key, PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


class Authority:
    """Signs the certificates of one job's processes."""

    def __init__(self, own: KeyedCertificate) -> None:
        """Raises ConfigError unless ``own`` is a certificate with its key."""
        self.own = own
        try:
            self._certificate = x509.load_pem_x509_certificate(own.certificate)
            key = serialization.load_pem_private_key(own.key, None)
        except ValueError as error:
            raise ConfigError(
                "the authority's certificate or key is no PEM", remedy="make another authority"
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError("the authority's key is on no elliptic curve", remedy="make another authority")
        self._key = key

    @classmethod
    def make(cls, name: str = "torch-ps", days: float = AUTHORITY_DAYS) -> Authority:
        """Make a new authority, valid for ``days`` from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _subject(f"{name} authority")
        builder = _builder(subject, subject, key, days)
        usage = _usage(signs_certificates=True)
        builder = builder.add_extension(x509.BasicConstraints(True, 0), True).add_extension(usage, True)
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        return cls(_signed(builder.add_extension(identifier, False), key, key))

    def issue(self, identity: str, hosts: Sequence[str] = (), days: float = CERTIFICATE_DAYS) -> KeyedCertificate:
        """A certificate of ``identity``, such as shard/job/0 or worker/alice, for servers at ``hosts`` and for clients.

        ``days`` counts from now; a negative number makes one that has expired.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(SCHEME + identity)]
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
        builder = (
            _builder(_subject(identity[:64]), self._certificate.subject, key, days)
            .add_extension(x509.BasicConstraints(False, None), True)
            .add_extension(_usage(signs_certificates=False), True)
            .add_extension(x509.ExtendedKeyUsage(purposes), False)
            .add_extension(x509.SubjectAlternativeName([*names, *map(_host, hosts)]), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), False)
        )
        return _signed(builder, key, self._key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - _CLOCK)
        .not_valid_after(end)
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _signed(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey
) -> KeyedCertificate:
    certificate = builder.sign(signer, hashes.SHA256())
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return KeyedCertificate(certificate.public_bytes(serialization.Encoding.PEM), secret)


class CertificateFolder:
    """One folder with the names below; made by ``psctl certs init`` and ``ps-run --tls``."""

    def __init__(self, path: Path, job: str = DEFAULT_JOB) -> None:
        self.path = path
        self.job = job

    @property
    def authority_file(self) -> Path:
        """The authority's certificate, which every process trusts."""
        return self.path / f"{AUTHORITY}.pem"

    @property
    def token_file(self) -> Path:
        """The file with a token for each role, one a line."""
        return self.path / TOKENS

    def pair(self, name: str) -> tuple[Path, Path]:
        """The files of the certificate and key of "coordinator", "shard-0", "admin", …"""
        return self.path / f"{name}.pem", self.path / f"{name}.key"

    def settings(self, name: str, *, require_client: bool = True, role: AccessRole | None = None) -> SecuritySettings:
        """The settings of the process with the certificate ``name``. A client has a ``role``, and its token."""
        certificate, key = self.pair(name)
        tokens = self.path / f"{role.value}.token" if role else self.token_file
        return SecuritySettings(
            tls_cert=certificate,
            tls_key=key,
            tls_ca=self.authority_file,
            require_client=require_client and role is None,
            token_file=tokens,
            job=self.job,
        )

    def make(self, shards: int, hosts: Sequence[str], days: float = CERTIFICATE_DAYS) -> list[Path]:
        """Make an authority, all certificates and tokens; returns what was made.

        Raises ConfigError if the folder has an authority already, or files cannot be written.
        """
        if self.authority_file.exists():
            raise ConfigError(
                f"{self.authority_file} exists", remedy="give another folder, or --renew for new certificates from it"
            )
        authority = Authority.make(f"torch-ps {self.job}")
        try:
            make_private_folder(self.path)
            made = [*self._write_pair(AUTHORITY, authority.own)]
            made += self._issue_all(authority, shards, hosts, days)
            return made + self.replace_tokens()
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def renew(self, shards: int, hosts: Sequence[str], days: float = CERTIFICATE_DAYS) -> list[Path]:
        """Replace the certificates by new ones of the same authority, each file at once. Raises ConfigError."""
        try:
            return self._issue_all(self._authority(), shards, hosts, days)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def have_shard(self, number: int, hosts: Sequence[str], days: float = CERTIFICATE_DAYS) -> None:
        """Make the certificate of a shard that is added to a job, unless it exists. Raises ConfigError."""
        if self.pair(f"shard-{number}")[0].exists():
            return
        try:
            list(self._issue_shard(self._authority(), number, hosts, days))
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def replace_tokens(self, keep: bool = False) -> list[Path]:
        """Replace the token of every role. ``keep``: servers accept the previous tokens, too.

        Without it they accept them until clients have the new ones: each client has one that is accepted at any time.
        """
        before = self.token_file.read_text() if self.token_file.exists() else ""
        lines = {role: f"{role.value}:{role.value}:{secrets.token_hex(32)}\n" for role in AccessRole}
        new = "".join(lines.values())
        made = [self._write(TOKENS, (new + before).encode())]
        made += [self._write(f"{role.value}.token", lines[role].encode()) for role in CLIENTS]
        if not keep:
            self._write(TOKENS, new.encode())
        return made

    def _issue_all(self, authority: Authority, shards: int, hosts: Iterable[str], days: float) -> list[Path]:
        pair = authority.issue(f"coordinator/{self.job}", _names(hosts), days)
        made = [*self._write_pair(COORDINATOR, pair)]
        for number in range(shards):
            made += self._issue_shard(authority, number, hosts, days)
        # A server for readers, which is itself a reader of the job.
        made += self._write_pair(RELAY, authority.issue(f"{AccessRole.READER.value}/{RELAY}", _names(hosts), days))
        for role in CLIENTS:
            made += self._write_pair(role.value, authority.issue(f"{role.value}/{role.value}", (), days))
        return made

    def _issue_shard(self, authority: Authority, number: int, hosts: Iterable[str], days: float) -> Iterator[Path]:
        identity = f"shard/{self.job}/{number}"
        yield from self._write_pair(f"shard-{number}", authority.issue(identity, _names(hosts), days))

    def _authority(self) -> Authority:
        certificate, key = self.pair(AUTHORITY)
        return Authority(KeyedCertificate(certificate.read_bytes(), key.read_bytes()))

    def _write_pair(self, name: str, pair: KeyedCertificate) -> Iterator[Path]:
        yield self._write(f"{name}.key", pair.key)
        yield self._write(f"{name}.pem", pair.certificate)

    def _write(self, name: str, data: bytes) -> Path:
        path = self.path / name
        replace_file(path, data)
        return path


def _names(hosts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*LOCAL_HOSTS, *hosts]))


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{error.filename or path} cannot be read or written: {error.strerror}", remedy="give another folder"
    )
