"""Two shards with two tables, and a worker that trains them."""

import pytest

from tests.recovery.conftest import launch  # noqa: F401
from tests.shard.reshard.moving import job
from tests.shard.reshard.test_table_moves import ADS, HERE, USERS, RowWorker, spec


@pytest.fixture
def made():
    with job(spec(), HERE, tables=(ADS, USERS)) as running:
        yield running


@pytest.fixture
def worker(made):
    with_rows = RowWorker(made)
    yield with_rows
    with_rows.end()
