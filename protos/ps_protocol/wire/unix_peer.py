"""Who is at the other end of a Unix socket: its user must be this process's own, or one that the settings name."""

from __future__ import annotations

import os
import socket
import struct

from ps_protocol.errors import PermissionDenied

_CREDENTIALS = struct.Struct("iII")  # process, user, group, as the kernel says


def peer_uid(sock: socket.socket) -> int:
    """The user of the process that connected, or that listens. Raises OSError."""
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


def check_peer(sock: socket.socket, shm_uid: int | None) -> None:
    """Raises PermissionDenied for a peer of another user than this process's own and ``shm_uid``; OSError."""
    own, uid = os.geteuid(), peer_uid(sock)
    if uid in (own, shm_uid):
        return
    raise PermissionDenied(
        "memory is not shared with a process of another user",
        expected=f"user {own}" if shm_uid is None else f"user {own} or {shm_uid}",
        actual=f"user {uid}",
        remedy=f"run both as one user, or give the side that says this --shm-uid {uid} (PS_SHM_UID)",
    )
