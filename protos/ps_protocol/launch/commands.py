"""The command line of a server, whoever starts it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from ps_protocol.flags import flags

# -P: the folder that a program is called in has the modules of the user, not those of the servers.
COORDINATOR = (sys.executable, "-P", "-m", "ps_server.coordinator.main")
SHARD = (sys.executable, "-P", "-m", "ps_server.shard.main")


def coordinator_command(
    settings: Mapping[str, object],
    more: Sequence[str] = (),
    *,
    bind: str,
    port: int = 0,
    served_at: str = "",
    program: Sequence[str] = COORDINATOR,
) -> list[str]:
    """A coordinator with ``settings``, and with the options of ``more``, which win.

    It listens at ``bind``:``port``. One that is started again has the port of ``served_at``, its host:port before:
    members look for it there.
    """
    where = {"bind": bind, "port": served_at.rpartition(":")[2] or port}
    return [*program, *flags({**where, **settings}), *more]


def shard_command(
    shard: int,
    coordinator: str,
    settings: Mapping[str, object],
    more: Sequence[str] = (),
    *,
    bind: str,
    program: Sequence[str] = SHARD,
) -> list[str]:
    """Shard number ``shard`` of the job of ``coordinator``, host:port, with ``settings`` and the options of ``more``.

    It listens on any port of ``bind``: its address is in the view of the job.
    """
    where = {"shard": shard, "coordinator": coordinator, "bind": bind, "port": 0}
    return [*program, *flags({**where, **settings}), *more]
