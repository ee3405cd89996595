"""What errors of OpenSSL mean for a side channel: typed errors that say whose certificate is not accepted, and why."""

from __future__ import annotations

import ssl

from ps_protocol.errors import PsError, Unauthenticated


def refusal(error: ssl.SSLError, peer: str) -> PsError | None:
    """What the error says about certificates; None: nothing."""
    reason = reason_of(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return Unauthenticated(
            f"the certificate of {peer} is not accepted",
            expected="a valid certificate of the authority in --tls-ca (PS_TLS_CA), for the address that is dialled",
            actual=error.verify_message,
            remedy="renew the certificate, or correct --tls-ca",
        )
    if "DID_NOT_RETURN_A_CERTIFICATE" in reason:
        return Unauthenticated(
            f"{peer} shows no certificate, and this side requires one",
            remedy="give it --tls-cert and --tls-key (PS_TLS_CERT, PS_TLS_KEY)",
        )
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return Unauthenticated(
            f"{peer} does not accept this side's certificate",
            actual=reason,
            remedy="see --tls-cert (PS_TLS_CERT) here and --tls-ca there",
        )
    return None


def broken(error: ssl.SSLError) -> ConnectionAbortedError:
    """A connection that was under TLS cannot go on."""
    return ConnectionAbortedError(f"the TLS connection broke: {reason_of(error)}")


def reason_of(error: ssl.SSLError) -> str:
    """OpenSSL's word for it."""
    return error.reason or str(error)
