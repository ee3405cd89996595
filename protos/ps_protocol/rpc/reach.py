"""Finds out why a process cannot be reached: an unknown host name, no listener, no route, no answer, or TLS."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ps_protocol import times
from ps_protocol.cluster.address import split_address
from ps_protocol.errors import ConfigError, Unauthenticated, Unavailable
from ps_protocol.security.security import OFF, Security


@dataclass(frozen=True, slots=True)
class TlsProbe:
    """Tries one server, blocking for ``seconds`` a try."""

    host: str
    port: int
    seconds: float
    #: For messages.
    peer: str
    #: Of this process.
    security: Security

    def why_refused(self) -> Unauthenticated | None:
        """The error to raise about the server; None: security is not the reason why it does not answer."""
        context = self.security.client_context("h2")
        if context is None:
            return self._without_tls()
        # A server that is being killed ends one connection, too, but not two.
        for _ in range(2):
            try:
                with self._connected(context) as connection:
                    if not _ended(connection):
                        return None
            except ssl.SSLCertVerificationError as error:
                date = self._end_of_certificate() if "expired" in error.verify_message else ""
                authorities = self.security.settings.tls_ca
                return Unauthenticated(
                    f"the certificate of {self.peer} is not accepted: {error.verify_message}{date}",
                    expected=f"a certificate for {self.host}, signed by an authority in {authorities}",
                    remedy="correct --tls-ca here, or the certificate there",
                )
            except ssl.SSLError as error:
                return self._told(error)
            except OSError:
                return None
        return self._not_accepted("it ends the connection")

    def _without_tls(self) -> Unauthenticated | None:
        try:
            with self._connected(_trusting()):
                pass
        except OSError:
            return None
        return Unauthenticated(
            f"{self.peer} speaks TLS, and this process does not",
            remedy="give the certificate of its authority: --tls-ca or PS_TLS_CA",
        )

    def _told(self, error: ssl.SSLError) -> Unauthenticated | None:
        """What the alert of a server means, or bytes that are no TLS."""
        reason = (error.reason or "").upper()
        if "ALERT" in reason:
            return self._not_accepted(reason.lower().partition("alert_")[2].replace("_", " "))
        if "WRONG_VERSION" in reason or "RECORD" in reason or "PACKET" in reason:
            return Unauthenticated(
                f"{self.peer} does not speak TLS, and this process does",
                remedy="start it with --tls-cert, --tls-key and --tls-ca, or correct the address",
            )
        return None

    def _not_accepted(self, why: str) -> Unauthenticated:
        own = self.security.settings.tls_cert
        return Unauthenticated(
            f"{self.peer} does not accept the certificate of this process: {why}",
            expected="one that is valid, of an authority that it trusts",
            actual=str(own) if own else "none",
            remedy="give --tls-cert and --tls-key, or replace these files: psctl certs init --renew",
        )

    def _end_of_certificate(self) -> str:
        """When the server's certificate ended to be valid, in words; empty where it does not show one any more."""
        from ps_protocol.security.certificates import read_certificates, shown

        try:
            with self._connected(_trusting()) as connection:
                data = connection.getpeercert(binary_form=True) or b""
        except OSError:
            return ""
        return f" on {shown(read_certificates(ssl.DER_cert_to_PEM_cert(data).encode(), 'it')[0].not_after)}"

    @contextmanager
    def _connected(self, context: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
        with (
            socket.create_connection((self.host, self.port), timeout=self.seconds) as connection,
            context.wrap_socket(connection, server_hostname=self.host) as wrapped,
        ):
            yield wrapped


def _ended(connection: ssl.SSLSocket) -> bool:
    """Whether the server ends the connection after the handshake, as it does, with TLS 1.3, for a client's certificate
    that it refuses; else it speaks first. Raises SSLError for an alert.
    """
    try:
        return not connection.recv(1)
    except ConnectionResetError:
        return True


def _trusting() -> ssl.SSLContext:
    """To look at what a server shows; nothing is sent over it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


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
