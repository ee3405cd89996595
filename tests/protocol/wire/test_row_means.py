"""The rows of several pushes become one."""

from __future__ import annotations

import numpy as np
import pytest

from ps_protocol.errors import InvalidRequest
from ps_protocol.wire.row_means import merge_rows
from tests.tables.samples import NO_IDS, random_ids


def test_each_id_comes_once_in_order_of_appearance_with_the_mean_of_its_gradients() -> None:
    def rows(*values: float) -> np.ndarray:
        return np.array(values, np.float32)[:, None]

    parts = [(np.array([5, 3]), rows(1, 2)), (np.array([4, 5]), rows(8, 10)), (NO_IDS, rows())]
    ids, mean = merge_rows(parts, 4)
    assert ids.tolist() == [5, 3, 4]
    assert mean[:, 0].tolist() == [2.75, 0.5, 2.0]


def test_sums_are_taken_in_the_order_given() -> None:
    random = np.random.default_rng(15)
    ids = random_ids(random, 100)
    parts = []
    for _ in range(5):
        chosen = random.permutation(ids)[:60]
        parts.append((chosen, random.standard_normal((60, 3)).astype(np.float32) * 1000))
    merged, mean = merge_rows(parts, 5)
    expected: dict[int, np.ndarray] = {}
    for numbers, gradients in parts:
        for id_, gradient in zip(numbers.tolist(), gradients, strict=True):
            expected[id_] = expected[id_] + gradient if id_ in expected else gradient
    assert merged.tolist() == list(expected)
    assert mean.tobytes() == (np.array(list(expected.values())) / np.float32(5)).tobytes()


def test_a_single_push_is_itself() -> None:
    ids, gradients = np.array([2, 1]), np.array([[-0.0], [1e-45]], np.float32)
    merged, mean = merge_rows([(ids, gradients)], 1)
    assert merged.tolist() == [2, 1]
    assert mean.tobytes() == gradients.tobytes()


def test_a_mean_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        merge_rows([], 1)


def test_with_weights_each_part_has_its_share_of_the_sum() -> None:
    ids = [np.array([7, 1]), np.array([1, 9])]
    gradients = [np.array([[1.0], [2.0]], np.float32), np.array([[4.0], [8.0]], np.float32)]
    merged, mean = merge_rows(list(zip(ids, gradients, strict=True)), 2, [0.25, 0.75])
    assert merged.tolist() == [7, 1, 9]
    assert mean[:, 0].tolist() == [0.25, 3.5, 6.0]
