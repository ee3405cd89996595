"""Warns of the certificates of this process in the last tenth of their time, and once they have expired."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ps_protocol.logs import EventLogger
from ps_protocol.security.security import Security

if TYPE_CHECKING:
    from ps_protocol.security.certificates import CertificateFacts

logger = EventLogger(__name__)

LAST_PART = 0.1
"""From this part of its time before its end on a certificate is warned of."""


class ExpiryWatch:
    """Of one process. Any thread may ask; each warning is logged once."""

    def __init__(self, security: Security, clock: Callable[[], float] = time.time) -> None:
        """``clock``: seconds since 1970."""
        self._security = security
        self._clock = clock
        self._lock = threading.Lock()
        #: The certificates that were warned of, and whether they had expired then.
        self._told: set[tuple[str, float, bool]] = set()

    def ends(self) -> float:
        """When the first of the certificates that are in the last tenth of their time expires, or has expired, in
        seconds since 1970; 0: none of them is.
        """
        now = self._clock()
        found = [(what, each) for what, each in self._security.held_certificates if now > _warned_from(each)]
        with self._lock:
            for what, each in found:
                self._tell(what, each, now)
        return min((each.not_after.timestamp() for _, each in found), default=0.0)

    def _tell(self, what: str, certificate: CertificateFacts, now: float) -> None:
        from ps_protocol.security.certificates import shown

        end = certificate.not_after.timestamp()
        told = what, end, now > end
        if told in self._told:
            return
        self._told.add(told)
        moment = shown(certificate.not_after)
        if now > end:
            logger.warning(
                "files.expire",
                "a certificate has expired: %s, on %s; connections that stand go on, and new ones are refused: replace "
                "it with psctl certs init --renew",
                what,
                moment,
            )
        else:
            logger.warning(
                "files.expire",
                "a certificate expires soon: %s, on %s; new connections are refused from then on: replace it with "
                "psctl certs init --renew",
                what,
                moment,
            )


def _warned_from(certificate: CertificateFacts) -> float:
    begin, end = certificate.not_before.timestamp(), certificate.not_after.timestamp()
    return end - LAST_PART * (end - begin)
