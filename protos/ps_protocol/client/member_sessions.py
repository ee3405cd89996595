"""The session tokens of a client's memberships: each proves one of them to the servers of the job."""

from __future__ import annotations

from ps_protocol.cluster.view import Member
from ps_protocol.security.credentials import SESSION, SessionCredential


class MemberSessions:
    """Owned by one CoordinatorClient, which joins and renews. Any thread may ask."""

    def __init__(self) -> None:
        self._credentials: dict[int, SessionCredential] = {}
        #: Verifies the sessions of this job; empty where nobody is authenticated.
        self.public_key = b""

    def of(self, member: Member) -> SessionCredential:
        """The credential of ``member``, renewed in place; empty before it joined."""
        return self._credentials.setdefault(member.incarnation, SessionCredential())

    def forget(self, member: Member) -> None:
        """The membership has ended."""
        self._credentials.pop(member.incarnation, None)

    def metadata(self, member: Member) -> tuple[tuple[str, bytes], ...]:
        """Of a call by ``member`` to the coordinator."""
        credential = self._credentials.get(member.incarnation)
        return ((SESSION, credential.token),) if credential and credential.token else ()
