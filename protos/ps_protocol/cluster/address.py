"""Parses addresses of processes, ``host:port`` with brackets around an IPv6 host, and ports."""

from __future__ import annotations

import re

from ps_protocol.errors import ConfigError
from ps_protocol.text import whole_number

#: Names, IPv4 addresses, and IPv6 ones with a zone.
_HOST = re.compile(r"[\w.%-]+|[0-9a-fA-F:.]+(%[\w.-]+)?")


def split_address(text: str, whose: str = "the coordinator", setting: str = "--coordinator") -> tuple[str, int]:
    """Host, without brackets, and port. Raises ConfigError, which says what is wrong with ``text``, and where it was
    given: in ``setting``.
    """

    def refused(what: str, remedy: str) -> ConfigError:
        return ConfigError(
            f"{whose}'s address is not host:port: {what}",
            expected="host:port, such as 10.0.0.5:7000",
            actual=repr(text),
            remedy=f"{remedy} in {setting}",
        )

    scheme, has_scheme, rest = text.partition("://")
    if has_scheme:
        raise refused("it begins with a scheme", f"write {rest.strip('/')!r}, without {scheme}://,")
    host, colon, port = text.rpartition(":")
    if not colon:
        raise refused("it has no port", f"write {text + ':7000'!r}, or whichever port it listens on,")
    if not 0 < (whole_number(port) or 0) <= 65535:
        raise refused("its port is no number from 1 to 65535", f"correct {port!r}")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    if not _HOST.fullmatch(bare) or (":" in bare and not bracketed):
        remedy = f"put the IPv6 address in brackets, as [{bare}]:{port}," if ":" in bare else f"correct {host!r}"
        raise refused("it has no host" if not host else "its host is not valid", remedy)
    return bare, int(port)


METRICS_OFF = "off"
"""In the place of a port: metrics are not served."""


def parse_metrics_port(text: str, setting: str = "--metrics-port (PS_METRICS_PORT)") -> int | None:
    """The port that ``setting`` names for metrics; None for "off". Raises ConfigError."""
    if text == METRICS_OFF:
        return None
    if (port := whole_number(text)) is not None and port < 1 << 16:
        return port
    raise ConfigError(
        f"{setting} is no port",
        expected=f"a number from 0 to 65535, or {METRICS_OFF}",
        actual=repr(text),
        remedy=f"correct {setting}, or leave it out",
    )


_SCHEMES = ("tcp://", "udp://", "sctp://")


def is_service_link(value: str) -> bool:
    """Whether ``value`` is that of such a variable, and no port that somebody has set."""
    return value.startswith(_SCHEMES)
