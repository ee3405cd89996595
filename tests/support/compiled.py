"""Compiles what tables need, once in a fresh checkout: ``python -m tests.support.compiled``, before the tests begin."""

from ps_server import tables
from tests.support.tables import table_spec

if __name__ == "__main__":
    for optimizer in ("sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"):
        tables.warm_up(table_spec(optimizer=optimizer))
