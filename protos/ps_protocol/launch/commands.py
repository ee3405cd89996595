"""The command line of a server, for every program that starts one: its settings as flags."""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping, Sequence

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


def flags(settings: Mapping[str, object]) -> list[str]:
    """``settings`` as the command line of a program that has an option for each: ``max_calls=7`` is --max-calls 7.

    True is a flag without a value. None and False give nothing: the program has its default. A list or tuple repeats
    its flag.
    """
    arguments: list[str] = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        for each in value if isinstance(value, list | tuple) else (value,):
            if each is True:
                arguments.append(flag)
            elif each is not None and each is not False:
                arguments += [flag, str(each.value if isinstance(each, enum.Enum) else each)]
    return arguments
