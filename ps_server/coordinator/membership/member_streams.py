"""Tells the membership on how many streams each process follows the cluster."""

from __future__ import annotations

from collections.abc import Callable

from ps_protocol.cluster.view import Role
from ps_server.coordinator.membership.state import MembershipState


class MemberStreams:
    """Called by the service, on the driver's loop. The processes need not be members any more."""

    def __init__(self, membership: MembershipState, clock: Callable[[], float]) -> None:
        self._membership = membership
        self._clock = clock

    def opened(self, role: Role, index: int, incarnation: int) -> None:
        """See MembershipState.connected."""
        self._membership.connected(role, index, incarnation)

    def ended(self, role: Role, index: int, incarnation: int) -> None:
        """See MembershipState.disconnected."""
        self._membership.disconnected(role, index, incarnation, self._clock())
