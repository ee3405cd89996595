"""The settings of security, from options or the environment: names of files, never their contents but for one token."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ps_protocol.cluster.job import DEFAULT_JOB, job_name
from ps_protocol.errors import ConfigError
from ps_protocol.text import whole_number


class BulkSecurity(enum.Enum):
    """How the bulk transport protects payloads while TLS is on."""

    #: TLS 1.3, as every other connection.
    TLS = "tls"
    #: Its one-time token goes over TLS, payloads are in clear: for a network that nobody else can read or change.
    TOKEN_ONLY = "token-only"


@dataclass(frozen=True, slots=True)
class SecuritySettings:
    """The same for every program. All defaults: no TLS, nobody is authenticated, listeners on loopback only."""

    #: Certificate of this process with its chain, PEM.
    tls_cert: Path | None = None
    #: Private key of ``tls_cert``, PEM, mode 0600.
    tls_key: Path | None = None
    #: Certificates of the authorities that are trusted, PEM.
    tls_ca: Path | None = None
    #: Servers: every client must show a certificate of ``tls_ca``.
    require_client: bool = False
    #: Lines role:name:secret, mode 0600. Servers accept all of them, clients send the first of their role.
    token_file: Path | None = None
    #: Clients: a token in place of a file.
    token: str = field(default="", repr=False)
    #: Listen beyond loopback although others could read or change what is sent, or join.
    insecure: bool = False
    bulk: BulkSecurity = BulkSecurity.TLS
    #: Another user than this process's own who may map shared memory, too.
    shm_uid: int | None = None
    #: Name of the job; the certificates of its servers name it.
    job: str = DEFAULT_JOB
    #: Servers: describe the services to tools such as grpcurl. None: unless callers are authenticated.
    reflection: bool | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> SecuritySettings:
        """``PS_TLS_CERT``, ``PS_TOKEN_FILE`` and the other variables of ``VARIABLES``. Raises ConfigError."""
        given = {name: environ[variable] for name, variable in VARIABLES.items() if environ.get(variable)}
        return cls(**{name: _READERS[name](VARIABLES[name], text) for name, text in given.items()})

    def with_given(self, **given: Any) -> SecuritySettings:
        """These settings with those of ``given`` that are not None."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    @property
    def environment(self) -> dict[str, str]:
        """The variables that give another process these settings."""
        default = SecuritySettings()
        changed = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != getattr(default, f.name)}
        return {VARIABLES[name]: _written(value) for name, value in changed.items()}

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return any((self.tls_cert, self.tls_key, self.tls_ca))

    @property
    def authenticates(self) -> bool:
        """Whether servers refuse callers who prove nothing."""
        return self.require_client or self.token_file is not None


VARIABLES: Mapping[str, str] = {
    "tls_cert": "PS_TLS_CERT",
    "tls_key": "PS_TLS_KEY",
    "tls_ca": "PS_TLS_CA",
    "require_client": "PS_TLS_REQUIRE_CLIENT",
    "token_file": "PS_TOKEN_FILE",
    "token": "PS_TOKEN",
    "insecure": "PS_INSECURE",
    "bulk": "PS_BULK_SECURITY",
    "shm_uid": "PS_SHM_UID",
    "job": "PS_JOB",
    "reflection": "PS_REFLECTION",
}
"""The environment variable of each setting."""


def _written(value: Any) -> str:
    match value:
        case bool():
            return str(int(value))
        case BulkSecurity():
            return value.value
        case _:
            return str(value)


def _switch(variable: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ConfigError(f"{variable} is not 0 or 1", actual=repr(text), remedy=f"correct {variable} or leave it out")
    return text == "1"


def _uid(variable: str, text: str) -> int:
    if (number := whole_number(text)) is None:
        raise ConfigError(f"{variable} is not a user's number", actual=repr(text), remedy=f"correct {variable}")
    return number


def _bulk(variable: str, text: str) -> BulkSecurity:
    try:
        return BulkSecurity(text)
    except ValueError:
        known = " or ".join(each.value for each in BulkSecurity)
        raise ConfigError(f"{variable} has no such value", expected=known, actual=repr(text)) from None


def _path(variable: str, text: str) -> Path:
    return Path(text)


def _text(variable: str, text: str) -> str:
    return text


_READERS: Mapping[str, Callable[[str, str], Any]] = {
    "tls_cert": _path,
    "tls_key": _path,
    "tls_ca": _path,
    "require_client": _switch,
    "token_file": _path,
    "token": _text,
    "insecure": _switch,
    "bulk": _bulk,
    "shm_uid": _uid,
    "job": job_name,
    "reflection": _switch,
}
