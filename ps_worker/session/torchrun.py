"""What torchrun's variables tell a worker of a job with parameter servers. They are hints: every other setting wins."""

from __future__ import annotations

from collections.abc import Mapping

from ps_protocol.errors import ConfigError

_REMEDY = "start the script with torchrun, which sets RANK and WORLD_SIZE, or set PS_RANK, which wins, or unset both"


def hinted_rank(environ: Mapping[str, str]) -> int | None:
    """``RANK``, where ``WORLD_SIZE`` is set as well. Raises ConfigError for numbers that do not fit together."""
    if not (environ.get("RANK") and environ.get("WORLD_SIZE")):
        return None
    rank, replicas = _count("RANK", environ), _count("WORLD_SIZE", environ)
    if rank >= replicas:
        raise ConfigError(
            "RANK is not below WORLD_SIZE", expected=f"0 to {replicas - 1}", actual=str(rank), remedy=_REMEDY
        )
    return rank


def is_one_of_several(environ: Mapping[str, str]) -> bool:
    """Whether torchrun has started this script more than once. Raises ConfigError."""
    return hinted_rank(environ) is not None and _count("WORLD_SIZE", environ) > 1


def with_host(address: str, environ: Mapping[str, str]) -> str:
    """``address``; one that is a port alone, as ":7000", is that port of ``MASTER_ADDR``."""
    host = environ.get("MASTER_ADDR", "")
    if not address.startswith(":") or not address[1:].isdecimal() or not host:
        return address
    return f"[{host}]{address}" if ":" in host else f"{host}{address}"


def _count(name: str, environ: Mapping[str, str]) -> int:
    text = environ[name]
    if not (text.isdecimal() and text.isascii()):
        raise ConfigError(f"{name} is not a whole number from 0", actual=repr(text), remedy=_REMEDY)
    return int(text)
