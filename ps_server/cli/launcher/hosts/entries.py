"""Parses the hosts of a job: ``--hosts host0,host1:4`` and host files, as mpirun has them. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ps_protocol.errors import ConfigError

# No leading dash: ssh would take it for an option.
_NAME = re.compile(r"(?:[\w.-]+@)?(?!-)[\w.-]+")
_ADDRESS = re.compile(r"(?!-)[\w.-]+")
_MOST_SLOTS = 4096


@dataclass(frozen=True, slots=True)
class HostEntry:
    """One host: the name that ssh is given, the number of workers it takes, and the address others reach it at."""

    name: str
    slots: int = 1
    #: Empty: the one that the connection of ssh came to.
    address: str = ""


def hosts_of(text: str) -> tuple[HostEntry, ...]:
    """The hosts of ``--hosts``. A host that is named again has the slots of both. Raises ConfigError."""
    return _merged((_entry(part.strip(), "--hosts") for part in text.split(",")), "--hosts")


def hosts_of_file(text: str, path: str) -> tuple[HostEntry, ...]:
    """The hosts of a host file: lines ``host0 slots=4 address=10.0.0.5`` or ``host0:4``; # begins a comment.

    Raises ConfigError naming the line.
    """
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        name, *settings = line.partition("#")[0].split() or [""]
        if name:
            where = f"{path}, line {number}"
            entries.append(_with_settings(_entry(name, where), settings, where))
    return _merged(entries, path)


def _entry(text: str, where: str) -> HostEntry:
    name, colon, slots = text.partition(":")
    if not _NAME.fullmatch(name):
        raise _refused(f"'{text}' is not a host", where, "host, host:slots or user@host:slots")
    return HostEntry(name, _slots(slots, where) if colon else 1)


def _with_settings(entry: HostEntry, settings: Sequence[str], where: str) -> HostEntry:
    for setting in settings:
        key, _, value = setting.partition("=")
        if key == "slots":
            entry = replace(entry, slots=_slots(value, where))
        elif key == "address":
            if not (_ADDRESS.fullmatch(value) or _is_ipv6(value)):
                raise _refused(f"'{value}' is not an address", where, "a name or an address without port")
            entry = replace(entry, address=value)
        else:
            raise _refused(f"'{setting}' is not known", where, "slots=N or address=HOST")
    return entry


def _is_ipv6(text: str) -> bool:
    try:
        return bool(ipaddress.IPv6Address(text))
    except ValueError:
        return False


def _slots(text: str, where: str) -> int:
    if not (text.isdecimal() and text.isascii()) or int(text) > _MOST_SLOTS:
        raise _refused(f"'{text}' is not a number of slots", where, f"0 to {_MOST_SLOTS}")
    return int(text)


def _merged(entries: Iterable[HostEntry], where: str) -> tuple[HostEntry, ...]:
    merged: dict[str, HostEntry] = {}
    for entry in entries:
        known = merged.get(entry.name)
        if known and entry.address and known.address and entry.address != known.address:
            raise _refused(f"{entry.name} has two addresses", where, "one address for each host")
        if known:
            entry = replace(known, slots=known.slots + entry.slots, address=known.address or entry.address)
        merged[entry.name] = entry
    if not merged:
        raise _refused("no host is named", where, "at least one host")
    return tuple(merged.values())


def _refused(message: str, where: str, expected: str) -> ConfigError:
    return ConfigError(f"{where}: {message}", expected=expected, remedy="correct it; see docs/deploy.md")
