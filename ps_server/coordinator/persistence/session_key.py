"""The key of sessions beside the journal: a coordinator that is restarted goes on with the sessions of its members."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ps_protocol.files import replace_file
from ps_protocol.security.security import Security

if TYPE_CHECKING:
    from ps_protocol.security.session import SessionSigner

FILE = "session.key"


def session_signer(security: Security, folder: Path | None) -> SessionSigner | None:
    """With the key in ``folder``, made where it is missing; without a folder, with one for this process alone.

    None where nobody is authenticated. Called with the journal locked. Raises ConfigError, DamagedData, OSError.
    """
    if not security.authenticates:
        return None
    from ps_protocol.security.session import SessionSigner

    if folder is None:
        return SessionSigner()
    path = folder / FILE
    if not path.exists():
        replace_file(path, SessionSigner().private_key)
    return SessionSigner.read(path)
