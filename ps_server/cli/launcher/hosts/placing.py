"""The hosts of a job: parses ``--hosts host0,host1:4`` and host files, and decides which process runs where. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ps_protocol.errors import ConfigError
from ps_protocol.text import whole_number
from ps_server.cli.launcher.events import ProcessName, ProcessRole
from ps_server.cli.launcher.hosts.messages import Ready

# No leading dash: ssh would take it for an option.
_NAME = re.compile(r"(?:[\w.-]+@)?(?!-)[\w.-]+")
_ADDRESS = re.compile(r"(?!-)[\w.-]+")
_MOST_SLOTS = 4096

THREADS_VARIABLE = "OMP_NUM_THREADS"


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
    if (slots := whole_number(text)) is None or slots > _MOST_SLOTS:
        raise _refused(f"'{text}' is not a number of slots", where, f"0 to {_MOST_SLOTS}")
    return slots


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


def all_slots(hosts: Sequence[HostEntry]) -> int:
    """The number of workers that ``hosts`` take."""
    return sum(host.slots for host in hosts)


def spread(
    hosts: Sequence[HostEntry], shards: int, workers: int, evaluators: int = 0
) -> Mapping[ProcessName, HostEntry]:
    """The host of each process.

    The coordinator is on the first host; shards and evaluators are dealt one by one, workers fill the slots of a host
    before those of the next. Raises ConfigError where there are more workers than slots.
    """
    slots = [host for host in hosts for _ in range(host.slots)]
    if workers > len(slots):
        raise ConfigError(
            "there are more workers than slots on the hosts",
            expected=f"at most {len(slots)} workers on {', '.join(f'{host.name}:{host.slots}' for host in hosts)}",
            actual=f"--workers {workers}",
            remedy="give hosts more slots (--hosts host0:4,host1:4), or fewer --workers",
        )
    placed = {ProcessName(ProcessRole.COORDINATOR): hosts[0]}
    placed |= {ProcessName(ProcessRole.SHARD, i): hosts[i % len(hosts)] for i in range(shards)}
    placed |= {ProcessName(ProcessRole.WORKER, i): slots[i] for i in range(workers)}
    return placed | {ProcessName(ProcessRole.EVALUATOR, i): hosts[i % len(hosts)] for i in range(evaluators)}


def addresses(hosts: Sequence[HostEntry], found: Mapping[str, Ready]) -> Mapping[str, str]:
    """Of each host, by name, the address that the other hosts reach it at.

    A host file may name it. Else it is the one to which the connection of ssh came; for a host that ps-run reached over
    its own loopback, the one from which the others saw ps-run come. Raises ConfigError where there is none.
    """
    known = {host.name: host.address or found[host.name].server_address for host in hosts}
    beyond = [name for name, address in known.items() if address and not _loopback(address)]
    here = next((found[name].client_address for name in beyond if found[name].client_address), "")
    for host in hosts:
        address = known[host.name]
        if address and (host.address or not beyond or not _loopback(address)):
            continue
        if not address or not here or _loopback(here):
            raise ConfigError(
                f"the address at which other hosts reach {host.name} is not known",
                actual=address or "no SSH_CONNECTION on that host",
                remedy=f"write it into a host file, as in '{host.name} slots={host.slots} address=10.0.0.5'",
            )
        known[host.name] = here
    return known


def threads(host: HostEntry, placed: Mapping[ProcessName, HostEntry], cores: int) -> int:
    """How many threads each worker of ``host`` has by default: its workers share its ``cores``."""
    workers = sum(other is host and process.part is ProcessRole.WORKER for process, other in placed.items())
    return max(1, cores // max(1, workers))


def shares_hosts(placed: Mapping[ProcessName, HostEntry]) -> bool:
    """Whether the job is on several hosts, and one of them has several workers."""
    workers = [host.name for process, host in placed.items() if process.part is ProcessRole.WORKER]
    return len({host.name for host in placed.values()}) > 1 and len(set(workers)) < len(workers)


def _loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"
