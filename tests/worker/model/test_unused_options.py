"""A worker logs each option that was not used once, however many shards tell of it."""

from __future__ import annotations

import pytest

from ps_protocol.model.spec import ModelSpec, Option, OptionDifference
from ps_worker.model.unused_options import UnusedOptions
from tests.support.tables import table_spec

SPEC = ModelSpec("model", "torch.optim.SGD", (), ({"lr": 0.1},), tables=(table_spec("ads"),))


def difference(used: Option = 0.1, own: Option = 0.05, table: int | None = None) -> OptionDifference:
    return OptionDifference(table or 0, table is not None, "lr", 0, used, own)


def test_ranks_option_values_and_remedy_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    lost = UnusedOptions(1, SPEC)
    lost.tell([difference(), difference()])
    lost.tell([difference(own=0.01)])
    assert [record.getMessage() for record in caplog.records] == [
        "model 'model': in sync a step is made with the options of the lowest rank: lr of group 0 is 0.1 on worker 0 "
        "and is used, 0.05 on worker 1 is not; give schedulers the same numbers on all workers, such as a metric that "
        "all of them know"
    ]


@pytest.mark.parametrize(("number", "shown"), [(0, "lr of table 'ads' is"), (5, "lr of table 5 is")])
def test_tables_are_named(caplog: pytest.LogCaptureFixture, number: int, shown: str) -> None:
    UnusedOptions(1, SPEC).tell([difference(table=number)])
    assert shown in caplog.text


def test_what_a_shard_says_forges_no_line(caplog: pytest.LogCaptureFixture) -> None:
    UnusedOptions(1, SPEC).tell([difference(used="1\nforged", own="\x1b[2J")])
    assert caplog.records[0].getMessage().isprintable()
