"""Variables that Kubernetes sets in pods for each Service of their namespace: NAME_PORT=tcp://10.0.0.1:7000. Pure."""

from __future__ import annotations

_SCHEMES = ("tcp://", "udp://", "sctp://")


def is_service_link(value: str) -> bool:
    """Whether ``value`` is that of such a variable, and no port that somebody has set."""
    return value.startswith(_SCHEMES)
