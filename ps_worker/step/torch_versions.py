"""Warns of a shard that runs another version of torch than this worker."""

from __future__ import annotations

import torch

from ps_protocol.logs import EventLogger
from ps_worker.transport.replies import Peer

logger = EventLogger("ps_worker")


class TorchVersions:
    """Of one shard, used by its stream."""

    def __init__(self) -> None:
        #: The version that was warned of last.
        self._told = ""

    def note(self, peer: Peer, version: str) -> None:
        """The shard says that it runs ``version``; empty: it does not say."""
        if version not in ("", str(torch.__version__), self._told):
            self._told = version
            logger.warning(
                "versions",
                "%s applies updates with torch %s, and this worker computes gradients with torch %s: results may "
                "differ in the last digits; install the same version on both",
                peer,
                version,
                torch.__version__,
            )
