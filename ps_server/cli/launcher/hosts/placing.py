"""Decides which process runs on which host, and at which address others reach each host. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence

from ps_protocol.errors import ConfigError
from ps_server.cli.launcher.events import ProcessName, ProcessRole
from ps_server.cli.launcher.hosts.entries import HostEntry
from ps_server.cli.launcher.hosts.messages import Ready


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


def _loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"
