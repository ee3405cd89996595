"""The k largest, exactly, however bad the guess from the sample."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.wire.codecs import built_in as module
from ps_protocol.wire.codecs.built_in import largest
from tests.support.length import examples


def by_sorting(values: np.ndarray, k: int) -> list[int]:
    """Magnitudes as their bits, so that NaN counts as the largest."""
    keys = np.abs(values).view(np.int32 if values.dtype == np.float32 else np.int64)
    return sorted(np.argsort(-keys.astype(np.int64), kind="stable")[:k].tolist())


@examples(200)
@given(
    st.sampled_from(["normal", "ties", "equal", "zeros", "rising", "falling", "periodic", "nan"]),
    st.integers(1, 3000),
    st.sampled_from([0.0001, 0.01, 0.3, 1.0]),
    st.sampled_from([np.float32, np.float64]),
    st.integers(0, 2**32 - 1),
)
def test_the_largest_are_those_that_sorting_finds(shape, n, ratio, dtype, seed):
    rng = np.random.default_rng(seed)
    made = rng.standard_normal(n)
    match shape:
        case "ties":
            made = np.round(made)
        case "equal":
            made[:] = -2.0
        case "zeros":
            made[rng.random(n) < 0.995] = 0.0
        case "rising":
            made = np.arange(n, dtype=float)
        case "falling":
            made = np.arange(n, 0, -1, dtype=float)
        case "periodic":
            # What the sample sees is not what there is.
            made[:: n // 32 | 1] += 1000.0
        case "nan":
            made[rng.random(n) < 0.02] = np.nan
            made[rng.random(n) < 0.02] = -np.inf
    values = made.astype(dtype)
    k = max(1, int(n * ratio))
    with pytest.MonkeyPatch.context() as patch:
        # Small enough that these sizes take many scans, samples and cuts.
        patch.setattr(module, "_SCAN_ELEMENTS", 64)
        patch.setattr(module, "_SAMPLE_ELEMENTS", 32)
        assert largest(values, k).tolist() == by_sorting(values, k)


def test_a_million_elements_go_through_the_sample():
    values = np.random.default_rng(5).standard_normal(1_000_003, dtype=np.float32)
    assert largest(values, 10_001).tolist() == by_sorting(values, 10_001)
