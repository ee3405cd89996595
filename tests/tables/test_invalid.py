"""Rows that no update can be made of are noticed."""

from __future__ import annotations

import numpy as np
import pytest

from ps_server.tables.invalid import first_nonfinite_row, has_duplicates
from tests.tables.samples import NO_IDS


def test_an_id_that_comes_twice_is_noticed() -> None:
    assert not has_duplicates(NO_IDS)
    assert not has_duplicates(np.arange(-5000, 5000))
    assert has_duplicates(np.append(np.arange(10_000), 17))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_row_that_is_not_finite_is_named(bad: float) -> None:
    rows = np.full((50, 7), np.finfo(np.float32).max, np.float32)
    rows[10] = -1e-45
    assert first_nonfinite_row(rows) is None
    rows[40, 1] = bad
    rows[33, 6] = bad
    assert first_nonfinite_row(rows) == 33
    assert first_nonfinite_row(rows[:0]) is None
