"""Finds out why a process cannot be reached: an unknown host name, nothing that listens, no route, or no answer."""

from __future__ import annotations

import socket

from ps_protocol import times
from ps_protocol.cluster.address import split_address
from ps_protocol.errors import ConfigError, Unauthenticated, Unavailable
from ps_protocol.rpc.tls_probe import TlsProbe
from ps_protocol.security.security import OFF, Security


class UnknownHost(Unavailable):
    """No host has this name, as far as this machine can tell."""


def why_unreachable(
    peer: str, address: str, timeout_seconds: float = 1.0, security: Security = OFF
) -> Unavailable | Unauthenticated:
    """The error to raise about ``peer`` at ``address``, which did not answer a call. Blocks for the time of one try.

    Unauthenticated where one of the two does not accept the other's certificate, or only one of them speaks TLS.
    """
    try:
        host, port = split_address(address)
        seconds = max(timeout_seconds, 0.01)
        with socket.create_connection((host, port), timeout=seconds):
            pass
        if refusal := TlsProbe(
            host, port, max(seconds, times.CONNECT_SECONDS) if security.tls else seconds, peer, security
        ).why_refused():
            return refusal
    except ConfigError as error:
        return Unavailable(error.message, expected=error.expected, actual=error.actual, remedy=error.remedy)
    except socket.gaierror as error:
        return UnknownHost(
            f"{peer} cannot be found: no host is known as '{host}' here ({error.strerror})",
            remedy="correct the name, or use the host's IP address",
        )
    except ConnectionRefusedError:
        return Unavailable(
            f"{peer} does not answer: nothing listens on port {port} there (connection refused)",
            remedy="start it there, or correct the port",
        )
    except OSError as error:
        return Unavailable(
            f"{peer} cannot be reached: {error.strerror or 'no answer to the connection (timed out)'}",
            remedy="check that the host runs, and that network and firewalls let this through",
        )
    return Unavailable(
        f"{peer} takes connections and does not answer",
        remedy="check that it is torch-ps that listens there, and see its log",
    )
