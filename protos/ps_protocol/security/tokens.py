"""Tokens: lines role:name:secret of a file. Several lines of one role let a token be replaced while a job runs."""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field
from pathlib import Path

from ps_protocol.errors import ConfigError
from ps_protocol.security.files import LoadedFiles, WatchedFiles, read_secret
from ps_protocol.security.roles import AccessRole
from ps_protocol.text import printable

SHORTEST_SECRET = 16
"""Characters of a secret at least."""

_LONGEST_SECRET = 1024
_SECRET = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class AccessToken:
    """One line: who has this secret may do what ``role`` may."""

    role: AccessRole
    name: str
    secret: str = field(repr=False)

    @property
    def digest(self) -> bytes:
        """Of the secret: all are compared at the same length."""
        return hashlib.sha256(self.secret.encode()).digest()


class TokenFile:
    """The tokens of one file, read again when it changes. Any thread may ask."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that is missing, open to others, or has a line that is no token."""
        self.path = path
        self._in_use = False
        self._tokens = WatchedFiles([path], self._load)
        self._in_use = True

    @property
    def tokens(self) -> tuple[AccessToken, ...]:
        """All lines, in order."""
        return self.current().value

    def current(self) -> LoadedFiles[tuple[AccessToken, ...]]:
        """The tokens as the file is now."""
        return self._tokens.current()

    def _load(self) -> tuple[AccessToken, ...]:
        text = _decoded(self.path)
        if self._in_use and not text.endswith("\n"):
            # Half of a secret may look like a whole one.
            raise ConfigError(
                f"the last line of {self.path} has no end: the file may be half written",
                expected="a line break at the end of a file that is replaced while it is in use",
            )
        return parse_tokens(text, str(self.path))

    def has(self, digest: bytes) -> bool:
        """Whether one of the tokens has this digest."""
        return any(hmac.compare_digest(token.digest, digest) for token in self.tokens)

    def find(self, secret: str) -> AccessToken | None:
        """The token with this secret. The time it takes does not depend on which one, or on how much of it is right."""
        asked, found = hashlib.sha256(secret.encode(errors="replace")).digest(), None
        for token in self.tokens:
            if hmac.compare_digest(token.digest, asked):
                found = token
        return found


def parse_tokens(text: str, where: str) -> tuple[AccessToken, ...]:
    """The tokens in ``text``; empty lines and lines that begin with # are skipped.

    Raises ConfigError, which names ``where`` and the line, and never a secret.
    """
    tokens = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            tokens.append(_parse(line.strip(), f"{where}, line {number}"))
    if not tokens:
        raise ConfigError(f"{where} has no token", expected="lines role:name:secret")
    return tuple(tokens)


def _parse(line: str, where: str) -> AccessToken:
    role, _, rest = line.partition(":")
    name, _, secret = rest.partition(":")
    try:
        chosen = AccessRole(role)
    except ValueError:
        known = ", ".join(each.value for each in AccessRole)
        raise ConfigError(
            f"{where} is not role:name:secret with a known role", expected=f"one of the roles {known}"
        ) from None
    if not name or not SHORTEST_SECRET <= len(secret) <= _LONGEST_SECRET or not _SECRET.fullmatch(secret):
        raise ConfigError(
            f"{where} is not role:name:secret",
            expected=f"a name, and a secret of {SHORTEST_SECRET} to {_LONGEST_SECRET} printed ASCII characters",
            actual=f"name {printable(name)!r}, a secret of {len(secret)} characters",
            remedy="make one with: python -c 'import secrets; print(secrets.token_hex(32))'",
        )
    return AccessToken(chosen, printable(name), secret)


def _decoded(path: Path) -> str:
    try:
        return read_secret(path, "the token file").decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the token file {path} is no text", expected="lines role:name:secret") from error
