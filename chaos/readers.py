"""Readers of the weights that the training publishes: what they see is compared."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

import torch

import ps_worker
from ps_protocol.errors import PsError
from ps_worker.security import SecuritySettings

NAME = "policy"

_PATIENCE_SECONDS = 300.0


class Reader(threading.Thread):
    """Follows the published weights until ``stop``; a thread of its own."""

    def __init__(self, address: str, security: SecuritySettings, dtype: torch.dtype | None) -> None:
        super().__init__(name="reader", daemon=True)
        self._subscription = ps_worker.subscribe(
            NAME, coordinator=address, dtype=dtype, security=security, reconnect_timeout_seconds=_PATIENCE_SECONDS
        )
        self._stopped = threading.Event()
        #: The digest of all values, by number of the version, in the order in which they came.
        self.seen: dict[int, str] = {}
        #: Why it ended before it was stopped.
        self.failed = ""

    def run(self) -> None:
        """See Thread."""
        try:
            for version in self._subscription:
                digest = hashlib.sha256()
                for name, value in version.tensors().items():
                    digest.update(name.encode() + value.reshape(-1).view(torch.uint8).numpy().tobytes())
                self.seen[version.number] = digest.hexdigest()
                if self._stopped.is_set():
                    return
        except PsError as error:
            if not self._stopped.is_set():
                self.failed = str(error)

    def stop(self) -> None:
        """End; what it waits for is not waited for."""
        self._stopped.set()
        self._subscription.close()
        self.join(10.0)


def contradictions(readers: Sequence[Reader]) -> list[str]:
    """What readers of the same dtype have seen that cannot be, in sentences."""
    found = [f"a reader of published weights ended: {reader.failed}" for reader in readers if reader.failed]
    known: dict[int, str] = {}
    for reader in readers:
        numbers = list(reader.seen)
        if numbers != sorted(numbers):
            found.append(f"a reader saw versions of weights that do not rise: {numbers}")
        if not numbers:
            found.append("a reader saw no version of weights")
        for number, digest in reader.seen.items():
            if known.setdefault(number, digest) != digest:
                found.append(f"two readers saw different values in version {number} of the weights")
    return found
