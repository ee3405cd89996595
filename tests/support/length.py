"""How much the tests try: everything under ``make test-long``, which sets TEST_LENGTH=full, less by default."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import product
from typing import Any, TypeVar

from hypothesis import settings

S, T = TypeVar("S"), TypeVar("T")

FULL = os.environ.get("TEST_LENGTH") == "full"

_SHORTER = 5
_FEWEST_EXAMPLES = 4

# The short one tries the same examples each time, like ``tests.support.seeds``.
settings.register_profile("short", deadline=None, print_blob=True, max_examples=10, derandomize=True)
settings.register_profile("full", deadline=None, print_blob=True, max_examples=100)


def load_profile() -> None:
    """Have Hypothesis use the profile of this length where a test does not set its own number of examples."""
    settings.load_profile("full" if FULL else "short")
    if not FULL:
        # It draws constants of our modules, too: other ones after tests that have imported others.
        with suppress(ImportError):
            from hypothesis.internal.conjecture import providers

            providers._get_local_constants = providers.Constants


def choose(full: T, short: T) -> T:
    """``full`` under ``make test-long``, else ``short``: how often, how many, which cases."""
    return full if FULL else short


def few(values: Iterable[T], count: int = 1) -> list[T]:
    """All ``values``, or the first ``count``: of cases that take one path, or whose paths have tests of their own."""
    found = list(values)
    return choose(found, found[:count])


def paired(one: Sequence[T], other: Sequence[S]) -> list[tuple[T, S]]:
    """All pairs, or as many as let each value appear once at least."""
    count = max(len(one), len(other))
    each_once = [(one[n % len(one)], other[n % len(other)]) for n in range(count)]
    return choose(list(product(one, other)), each_once)


def examples(full: int, **options: Any) -> settings:
    """Settings of Hypothesis with ``full`` examples, or a fifth of them; ``options`` are other settings."""
    count = choose(full, min(full, max(_FEWEST_EXAMPLES, full // _SHORTER)))
    return settings(settings.get_profile(choose("full", "short")), max_examples=count, **options)
