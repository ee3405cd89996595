"""What a dialler shows with each call: its token, and the session of its membership."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ps_protocol.errors import ConfigError
from ps_protocol.security.files import LoadedFiles
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.settings import SecuritySettings
from ps_protocol.security.tokens import AccessToken, TokenFile, parse_tokens

if TYPE_CHECKING:
    from ps_protocol.security.tls import TlsMaterial

AUTHORIZATION = "authorization"
"""Metadata of a call: Bearer, and the secret of a token."""

SIGNATURE_BYTES = 64
"""A session token begins with its signature; JSON follows."""

SESSION = "ps-session-bin"
"""Metadata of a call by a member: its session token."""

_PREFIX = "Bearer "

_PREFERRED: Mapping[AccessRole, tuple[AccessRole, ...]] = {
    AccessRole.ADMIN: (AccessRole.ADMIN, AccessRole.READER, AccessRole.VIEWER),
    AccessRole.READER: (AccessRole.READER, AccessRole.WORKER, AccessRole.ADMIN),
}


class SessionCredential:
    """The session token of one membership, renewed in place. One thread sets it, any thread reads it."""

    def __init__(self) -> None:
        self.token = b""

    def renew(self, token: bytes) -> None:
        """Take a newer token; an empty one changes nothing."""
        self.token = token or self.token


@dataclass(frozen=True, slots=True)
class ShownCredentials:
    """What one call shows, and the files that its connection was made from. Made by ``Security.show``."""

    #: None: without TLS.
    files: LoadedFiles[TlsMaterial] | None = None
    token: AccessToken | None = None
    session: bytes = b""

    def metadata(self, *, to_shard: bool) -> tuple[tuple[str, str | bytes], ...]:
        """What the call carries. A member's calls to shards carry its session alone, and the token, too, when that is
        another one than the session was made with: it was replaced since the last heartbeat.
        """
        shown: list[tuple[str, str | bytes]] = []
        if self.session:
            shown.append((SESSION, self.session))
        if self.token and not (self.session and to_shard and self._made_with_this_token()):
            shown.append((AUTHORIZATION, bearer(self.token.secret)))
        return tuple(shown)

    def _made_with_this_token(self) -> bool:
        made_with = made_with_token(self.session)
        return not made_with or not self.token or made_with == self.token.digest


class OwnTokens:
    """The token that this process sends: from the environment, else from its file, read again when that changes."""

    def __init__(self, settings: SecuritySettings, role: AccessRole, file: TokenFile | None) -> None:
        """``role``: what this process does. Raises ConfigError for a PS_TOKEN that is no token."""
        self._given = _given(settings.token, role) if settings.token else None
        self._file = file
        self._preferred = _PREFERRED.get(role, (role,))

    @property
    def token(self) -> AccessToken | None:
        """The first line of the preferred role, else the first line."""
        if self._given or self._file is None:
            return self._given
        tokens = self._file.tokens
        ranked = (token for role in self._preferred for token in tokens if token.role is role)
        return next(ranked, tokens[0])

    @property
    def outdated(self) -> bool:
        """Whether the file has changed to something that is not taken: it is being replaced, or is wrong."""
        return self._given is None and self._file is not None and self._file.current().outdated


def _given(text: str, role: AccessRole) -> AccessToken:
    line = text if ":" in text else f"{role.value}:environment:{text}"
    tokens = parse_tokens(line, "PS_TOKEN")
    if len(tokens) > 1:
        raise ConfigError("PS_TOKEN is one token", remedy="use PS_TOKEN_FILE for several")
    return tokens[0]


@lru_cache(maxsize=64)
def made_with_token(session: bytes) -> bytes:
    """The digest, named in a session token, of the token that it was made with; empty if it names none. The signature
    is not checked.
    """
    try:
        return bytes.fromhex(json.loads(session[SIGNATURE_BYTES:])["token"])
    except (ValueError, KeyError, TypeError):
        return b""


def bearer(secret: str) -> str:
    """The value of ``AUTHORIZATION``."""
    return _PREFIX + secret


def secret_of(authorization: str) -> str:
    """The secret in a value of ``AUTHORIZATION``; empty where there is none."""
    return authorization.removeprefix(_PREFIX).strip() if authorization.startswith(_PREFIX) else ""
