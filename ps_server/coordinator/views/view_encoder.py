"""The bytes of views: each is encoded once for all watchers that are told the same."""

from __future__ import annotations

from dataclasses import replace

from ps_protocol.cluster.view import ClusterView
from ps_protocol.wire.convert import cluster as convert

MOST_CHANGES = 16
"""Watchers have so many different views before the newest one; slower ones are sent the whole newest view."""


class ViewEncoder:
    """Owned by the service. Keeps the newest view that it was given, with its bytes, and those of its members."""

    def __init__(self) -> None:
        self._view = ClusterView()
        self._whole = b""
        #: By the revision of the view before.
        self._changes: dict[int, bytes] = {}
        #: By incarnation, which no other member ever has: a view of that member alone.
        self._members: dict[int, bytes] = {}

    def encode(self, view: ClusterView, before: ClusterView | None = None) -> bytes:
        """``view``, for a watcher that has ``before``; None: for one that has nothing, or takes no changes."""
        if view is not self._view:
            self._view, self._whole, self._changes = view, b"", {}
        if before is not None:
            if before.revision not in self._changes and len(self._changes) < MOST_CHANGES:
                self._changes[before.revision] = convert.changed_view_to_pb(view, before).SerializeToString()
            if (changes := self._changes.get(before.revision)) is not None:
                return changes
        self._whole = self._whole or self._encode(view)
        return self._whole

    def _encode(self, view: ClusterView) -> bytes:
        known = self._members
        if len(known) > 2 * len(view.members):
            known.clear()
        for member in view.members:
            if member.incarnation not in known:
                known[member.incarnation] = convert.encoded_member(member)
        # Encoded messages one after the other are one message, with the members of all.
        rest = convert.VIEW.to_pb(replace(view, members=())).SerializeToString()
        return rest + b"".join([known[member.incarnation] for member in view.members])
