"""Certificates and tokens of a test: one authority for the whole run, files of its own for each folder."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.settings import SecuritySettings
from ps_server.certs import Authority, CertificateFolder, KeyedCertificate


@cache
def authority() -> Authority:
    return Authority.make("test")


def write_pair(folder: Path, name: str, pair: KeyedCertificate) -> tuple[Path, Path]:
    """Certificate and key file, replaced whole."""
    paths = folder / f"{name}.pem", folder / f"{name}.key"
    for path, data in zip(paths, (pair.certificate, pair.key), strict=True):
        partial = path.with_suffix(".part")
        partial.touch(0o600)
        partial.write_bytes(data)
        partial.replace(path)
    return paths


def made_folder(path: Path, shards: int = 2) -> CertificateFolder:
    """What ``psctl certs init`` makes, in ``path``."""
    folder = CertificateFolder(path)
    folder.make(shards, [])
    return folder


def security_of(folder: CertificateFolder, name: str, **changes: object) -> Security:
    """Of the process with the certificate ``name``: "coordinator", "shard-0", "worker", …"""
    client = name in [role.value for role in AccessRole]
    role = AccessRole(name) if client else AccessRole.SERVER
    settings: SecuritySettings = folder.settings(name, role=role if client else None)
    return Security(settings.with_given(**changes), role, listens=not client)
