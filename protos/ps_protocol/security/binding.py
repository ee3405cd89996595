"""Decides where a server may listen: beyond loopback only with TLS and authenticated callers, or with --insecure."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from ps_protocol.errors import ConfigError
from ps_protocol.logs import EventLogger
from ps_protocol.security.settings import SecuritySettings

logger = EventLogger(__name__)


def is_loopback(host: str) -> bool:
    """Whether only this host reaches a listener on ``host``. A name that is not known here is none of its addresses."""
    if host in ("", "*"):
        return False
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


class HostNames:
    """The names of this host in requests of browsers: a page of another site can give itself an address here, and read
    what is served without authentication by a name of its own. Any thread may ask.
    """

    def __init__(self, *named: str) -> None:
        """``named``: more names of this host."""
        self._names = {name.lower() for name in ("localhost", socket.gethostname(), *named) if name}

    def allow(self, header: str) -> bool:
        """Whether the header Host of a request names an IP address or this host. One that is empty does: every browser
        sends it.
        """
        if not header:
            return True
        try:
            name = urlsplit(f"//{header}").hostname or ""
        except ValueError:
            return False
        try:
            ipaddress.ip_address(name.partition("%")[0])
        except ValueError:
            # Looked up when it is needed: that may take a while.
            return name in self._names or name == socket.getfqdn().lower()
        return True


def check_bind(settings: SecuritySettings, host: str, what: str) -> None:
    """Raises ConfigError when ``what`` would listen on ``host`` unprotected, unless the settings say it may."""
    missing = []
    if not settings.tls:
        missing.append("TLS")
    if not settings.authenticates:
        missing.append("tokens")
    if not missing or is_loopback(host):
        return
    if settings.insecure:
        logger.warning(
            "server.insecure",
            "%s listens on %s without %s: everybody who reaches it may join, read and change the job (--insecure)",
            what,
            host or "all addresses",
            " and ".join(missing),
        )
        return
    raise ConfigError(
        f"{what} would listen on {host or 'all addresses'} without {' and '.join(missing)}",
        expected="beyond loopback: --tls-cert, --tls-key and --tls-ca, and --token-file or --tls-require-client",
        actual=f"--bind {host}" if host else "a bind to all addresses",
        remedy="make the files with psctl certs init, or give --insecure (PS_INSECURE=1) where everybody who reaches "
        "this host is trusted",
    )
