"""``python -m tests.support.compiled``, before the tests begin: compiles what tables need, once in a fresh checkout.

Beside it, on another core, the tests are collected, which keeps their byte code for the processes that run them.
"""

import subprocess
import sys

from ps_server import tables
from tests.support.tables import table_spec

if __name__ == "__main__":
    collecting = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    # What cannot be collected is reported by the tests themselves.
    with subprocess.Popen(collecting, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        for optimizer in ("sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"):
            tables.warm_up(table_spec(optimizer=optimizer))
