"""Decides where a server may listen: beyond loopback only with TLS and authenticated callers, or with --insecure."""

from __future__ import annotations

import ipaddress
import logging
import socket

from ps_protocol.errors import ConfigError
from ps_protocol.security.settings import SecuritySettings

logger = logging.getLogger(__name__)


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
