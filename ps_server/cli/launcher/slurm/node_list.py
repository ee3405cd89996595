"""Expands the node lists of Slurm, as in ``gpu[01-03,7],login``. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ps_protocol.errors import ConfigError

_MOST_NODES = 100_000

_PARTS = re.compile(r"([^,\[\]]*(?:\[[^\[\]]*\][^,\[\]]*)*)(?:,|$)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand(text: str) -> list[str]:
    """The names in order. Raises ConfigError for what is no node list."""
    names: list[str] = []
    position = 0
    while position < len(text):
        found = _PARTS.match(text, position)
        if found is None or not found[1]:
            raise _refused(text)
        names += _names(found[1], text)
        if len(names) > _MOST_NODES:
            raise _refused(text)
        position = found.end()
    if not names or text.endswith(","):
        raise _refused(text)
    return names


def _names(part: str, text: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [before]
    ranges, _, after = rest.partition("]")
    tails = _names(after, text)
    return [f"{before}{number}{tail}" for number in _numbers(ranges, text) for tail in tails]


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for each in ranges.split(","):
        found = _RANGE.fullmatch(each)
        if found is None:
            raise _refused(text)
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first) or int(last) - int(first) > _MOST_NODES:
            raise _refused(text)
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _refused(text: str) -> ConfigError:
    return ConfigError(
        "this is no node list of Slurm",
        expected="names and ranges, such as gpu[01-03,7],login",
        actual=repr(text[:200]),
        remedy="start ps-run --slurm with srun, which sets SLURM_STEP_NODELIST",
    )
