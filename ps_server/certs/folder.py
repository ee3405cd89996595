"""The files of a laboratory: an authority, a certificate for each process and role, tokens. Secrets have mode 0600."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ps_protocol.cluster.job import DEFAULT_JOB
from ps_protocol.errors import ConfigError
from ps_protocol.files import make_private_folder, replace_file
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.settings import SecuritySettings
from ps_server.certs.authority import CERTIFICATE_DAYS, Authority, KeyedCertificate

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")

AUTHORITY = "ca"
COORDINATOR = "coordinator"
TOKENS = "tokens"

CLIENTS = (AccessRole.ADMIN, AccessRole.WORKER, AccessRole.READER, AccessRole.VIEWER)


class CertificateFolder:
    """One folder with the names below; made by ``psctl certs init`` and ``ps-run --tls``."""

    def __init__(self, path: Path, job: str = DEFAULT_JOB) -> None:
        self.path = path
        self.job = job

    @property
    def authority_file(self) -> Path:
        """The authority's certificate: what everybody trusts."""
        return self.path / f"{AUTHORITY}.pem"

    @property
    def token_file(self) -> Path:
        """A line for each role."""
        return self.path / TOKENS

    def pair(self, name: str) -> tuple[Path, Path]:
        """Certificate and key of "coordinator", "shard-0", "admin", …"""
        return self.path / f"{name}.pem", self.path / f"{name}.key"

    def settings(self, name: str, *, require_client: bool = True, role: AccessRole | None = None) -> SecuritySettings:
        """Of the process with the certificate ``name``. ``role``: a client, which gets the token of its role alone."""
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

        Raises ConfigError where an authority is there already, or files cannot be written.
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
        """Make the certificate of a shard that is added to a job, where there is none. Raises ConfigError."""
        if self.pair(f"shard-{number}")[0].exists():
            return
        try:
            list(self._issue_shard(self._authority(), number, hosts, days))
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def replace_tokens(self, keep: bool = False) -> list[Path]:
        """Replace the token of every role. ``keep``: servers go on accepting the ones before, too."""
        before = self.token_file.read_text() if keep else ""
        lines = {role: f"{role.value}:{role.value}:{secrets.token_hex(32)}\n" for role in AccessRole}
        made = [self._write(TOKENS, ("".join(lines.values()) + before).encode())]
        return made + [self._write(f"{role.value}.token", lines[role].encode()) for role in CLIENTS]

    def _issue_all(self, authority: Authority, shards: int, hosts: Iterable[str], days: float) -> list[Path]:
        pair = authority.issue(f"coordinator/{self.job}", _names(hosts), days)
        made = [*self._write_pair(COORDINATOR, pair)]
        for number in range(shards):
            made += self._issue_shard(authority, number, hosts, days)
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
