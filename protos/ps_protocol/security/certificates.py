"""Reads certificates: validity, the names of their holder, and whether a key belongs to one."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from ps_protocol.errors import ConfigError
from ps_protocol.security.identity import CertificateIdentity


@dataclass(frozen=True, slots=True)
class CertificateFacts:
    """One certificate of a file."""

    subject: str
    issuer: str
    not_before: datetime.datetime
    not_after: datetime.datetime
    #: DNS names and IP addresses.
    hosts: tuple[str, ...]
    identity: CertificateIdentity | None
    public_key: bytes

    def check_time(self, what: str, now: datetime.datetime | None = None) -> None:
        """Raises ConfigError, naming ``what`` and the date, for one that is not valid yet or any more."""
        now = now or datetime.datetime.now(datetime.UTC)
        if now > self.not_after:
            raise ConfigError(
                f"{what} has expired on {shown(self.not_after)}", remedy="replace it: psctl certs init --renew"
            )
        if now < self.not_before:
            raise ConfigError(
                f"{what} is not valid before {shown(self.not_before)}", remedy="correct the clock, or replace it"
            )


def shown(moment: datetime.datetime) -> str:
    """A date for people, in UTC."""
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def read_certificates(pem: bytes, what: str) -> list[CertificateFacts]:
    """The certificates in ``pem``, in order. Raises ConfigError, naming ``what``."""
    try:
        return [_facts(each) for each in x509.load_pem_x509_certificates(pem)]
    except ValueError as error:
        raise ConfigError(f"{what} has no certificate in PEM form: {error}", remedy="correct the file") from error


def check_pair(certificate: CertificateFacts, key_pem: bytes, cert_file: Path, key_file: Path) -> None:
    """Raises ConfigError, naming both files, unless the key is that of the certificate."""
    try:
        key = serialization.load_pem_private_key(key_pem, None)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{key_file} has no private key in PEM form without a password", remedy="correct --tls-key"
        ) from error
    if _encoded(key.public_key()) != certificate.public_key:
        raise ConfigError(
            f"the key in {key_file} is not that of the certificate in {cert_file}",
            remedy="give the key that the certificate was made for",
        )


@lru_cache(maxsize=1024)
def facts_in(pem: bytes) -> CertificateFacts | None:
    """Of the first certificate in ``pem``; None where there is none that can be read."""
    try:
        return _facts(x509.load_pem_x509_certificate(pem))
    except ValueError:
        return None


def _facts(certificate: x509.Certificate) -> CertificateFacts:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    addresses = map(str, names.get_values_for_type(x509.IPAddress))
    return CertificateFacts(
        certificate.subject.rfc4514_string(),
        certificate.issuer.rfc4514_string(),
        certificate.not_valid_before_utc,
        certificate.not_valid_after_utc,
        (*names.get_values_for_type(x509.DNSName), *addresses),
        CertificateIdentity.first(names.get_values_for_type(x509.UniformResourceIdentifier)),
        _encoded(certificate.public_key()),
    )


def _encoded(key: object) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(serialization.Encoding.DER, form)  # type: ignore[attr-defined,no-any-return]
