"""Seeds of random tests: the same ones each time under ``make test``, new ones each time under ``make test-long``.

A change is judged by inputs that do not differ from those of the run before it. What explores draws its seeds:
``make test-long``, ``make sim``, ``make chaos``, ``make damage``, ``make fuzz``. TEST_SEED repeats a printed seed.
"""

from __future__ import annotations

import os
import random
from binascii import crc32

from tests.support.length import FULL


def drawn_seed() -> int:
    """The seed of this test, which it prints; below 2**20."""
    if told := os.environ.get("TEST_SEED"):
        seed = int(told)
    elif FULL:
        seed = random.SystemRandom().randrange(1 << 20)
    else:
        seed = crc32(os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0].encode()) % (1 << 20)
    print(f"seed {seed}")
    return seed


def seeded() -> random.Random:
    """A source of random values made from this test's seed."""
    return random.Random(drawn_seed())
