"""Makes a certificate authority and the certificates of a job's processes. Keys are on the curve P-256."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ps_protocol.errors import ConfigError
from ps_protocol.security.identity import SCHEME

AUTHORITY_DAYS = 3650.0
CERTIFICATE_DAYS = 365.0

_CLOCK = datetime.timedelta(minutes=5)
"""Certificates are valid from a little before now: clocks differ."""


@dataclass(frozen=True, slots=True)
class KeyedCertificate:
    """A certificate and its private key, PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


class Authority:
    """Signs certificates of one job's processes."""

    def __init__(self, own: KeyedCertificate) -> None:
        """Raises ConfigError for what is no certificate with its key."""
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
        """A new one, valid for ``days`` from now."""
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
