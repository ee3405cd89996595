"""docs/times.md gives the numbers that the programs use."""

import re
from pathlib import Path

from ps_protocol import retry
from ps_protocol import times as shared
from ps_protocol.retry import Retry
from ps_server.cli.launcher import times as launcher
from ps_server.coordinator import times as coordinator
from ps_server.coordinator.settings import ClusterSettings
from ps_server.shard import times as shard
from ps_worker import times as worker

PAGE = Path(__file__).parents[1] / "docs" / "times.md"
TABLES = (shared, worker, coordinator, shard, launcher)

_NUMBER = re.compile(r"(?:([\d.]+) s to )?([\d.]+) (s|MB/s)\s+\(`([A-Za-z_]+)`\)")


def known(name: str) -> set[tuple[float, ...]]:
    """What the page may say of ``name``."""
    policy = getattr(retry, name, None)
    if isinstance(policy, Retry):
        return {(policy.first_seconds, policy.longest_seconds), (policy.total_seconds,)}
    if name == "SLOWEST_BYTES_PER_SECOND":
        return {(shared.SLOWEST_BYTES_PER_SECOND / 1e6,)}
    if name == "lease_seconds":
        return {(ClusterSettings().lease_seconds,)}
    return {(getattr(table, name),) for table in TABLES if hasattr(table, name)}


def test_every_time_on_the_page_is_that_of_the_programs():
    text = PAGE.read_text()
    found = [(m[4], tuple(float(each) for each in (m[1], m[2]) if each)) for m in _NUMBER.finditer(text)]
    assert {name: value for name, value in found if value not in known(name)} == {}
    named = re.findall(r"\(`([A-Z_]+)`\)", text)
    assert len(found) == len(named) + text.count("(`lease_seconds`)"), "a name without its number before it"


def test_a_name_stands_for_one_time_only():
    names = [name for table in TABLES for name in vars(table) if name.isupper()]
    assert sorted({name for name in names if names.count(name) > 1}) == []
