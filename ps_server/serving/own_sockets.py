"""The TCP connections of this process to one of its ports, as the kernel lists them, and the end of one of them.

gRPC accepts connections by itself and tells nobody. Linux only.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

LISTS = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_DESCRIPTORS = "/proc/self/fd"
_ESTABLISHED = "01"
_WORD_BYTES = 4

Endpoint = tuple[str, int]
"""Address and port of the other side."""


@dataclass(frozen=True, slots=True)
class Connection:
    """One that is established and accepted."""

    peer: Endpoint
    #: Of the socket; a later one is higher most of the time, and no two of a moment are the same.
    inode: int


def connections_to(port: int) -> list[Connection]:
    """Of every process that has this port; those of others are not found by ``end``. Raises OSError without /proc."""
    found, marker = [], f":{port:04X} "
    for path in LISTS:
        if path is not LISTS[0] and not path.exists():
            continue  # a machine without IPv6
        found += [each for line in path.read_text().splitlines() if marker in line and (each := _parse(line, port))]
    return found


def _parse(line: str, port: int) -> Connection | None:
    fields = line.split()
    address, _, local = fields[1].partition(":")
    if fields[3] != _ESTABLISHED or int(local, 16) != port:
        return None
    address, _, other = fields[2].partition(":")
    inode = int(fields[9])
    # 0: it waits to be accepted.
    return Connection((_address(address), int(other, 16)), inode) if inode else None


def _address(text: str) -> str:
    """The kernel prints words of four bytes in the order of the machine."""
    data = bytes.fromhex(text)
    if sys.byteorder == "little":
        data = b"".join(data[at : at + _WORD_BYTES][::-1] for at in range(0, len(data), _WORD_BYTES))
    return _plain(ipaddress.ip_address(data))


def _plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def endpoint_of(peer: str) -> Endpoint | None:
    """The endpoint in gRPC's name of a peer: ipv4:10.0.0.1:4711, ipv6:%5B::1%5D:4711. None for another form."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    try:
        return _plain(ipaddress.ip_address(host.strip("[]").partition("%")[0])), int(port)
    except ValueError:
        return None


def end(connection: Connection) -> bool:
    """End ``connection``: both sides find it closed. False when it is none of this process, or none any more."""
    name = f"socket:[{connection.inode}]"
    for descriptor in _sockets_named(name):
        with suppress(OSError):
            # A copy: the number may be closed and used again meanwhile.
            copy = os.dup(descriptor)
            with socket.socket(fileno=copy) as held:
                if os.readlink(f"{_DESCRIPTORS}/{copy}") == name:  # noqa: PTH115 -- called for thousands
                    held.shutdown(socket.SHUT_RDWR)
                    return True
    return False


def _sockets_named(name: str) -> Iterator[int]:
    for entry in os.listdir(_DESCRIPTORS):  # noqa: PTH208 -- called for thousands
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"{_DESCRIPTORS}/{entry}") == name:  # noqa: PTH115
                yield int(entry)
