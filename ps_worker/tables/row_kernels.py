"""Compiled loops over rows in the worker's memory. Arguments are numpy arrays; see ``compiled.py`` for their shapes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ps_protocol.model.kernels import kernel


@kernel("void(float32[:, ::1], int64[::1], float32[:, ::1])")
def put_rows(target: Any, places: Any, rows: Any) -> None:
    """``target[places[i]] = rows[i]``."""
    for i in range(places.size):
        place = places[i]
        for k in range(rows.shape[1]):
            target[place, k] = rows[i, k]


@kernel("void(float32[:, ::1], int64[::1], float32[:, ::1])")
def add_rows(target: Any, places: Any, rows: Any) -> None:
    """``target[places[i]] += rows[i]``, in the order of ``i``."""
    for i in range(places.size):
        place = places[i]
        for k in range(rows.shape[1]):
            target[place, k] += rows[i, k]


@kernel("void(float32[:, ::1], int64[::1], int64[::1], int64, float32[:, ::1], boolean, float32[::1])")
def add_bags(target: Any, places: Any, offsets: Any, skipped: Any, bags: Any, mean: Any, weights: Any) -> None:
    """Add ``bags[b]`` to every row of bag b, times its share of a mean, and its weight if any."""
    for bag in range(bags.shape[0]):
        first, last = offsets[bag], offsets[bag + 1]
        share = np.float32(1.0)
        if mean:
            members = 0
            for i in range(first, last):
                members += places[i] != skipped
            share = np.float32(1.0) / np.float32(max(members, 1))
        for i in range(first, last):
            place = places[i]
            if place != skipped:
                factor = share * weights[i] if weights.size else share
                for k in range(bags.shape[1]):
                    target[place, k] += bags[bag, k] * factor


@kernel("void(float32[::1], int64[::1], int64[::1], int64, float32[:, ::1], float32[:, ::1])")
def dot_bags(target: Any, places: Any, offsets: Any, skipped: Any, bags: Any, rows: Any) -> None:
    """``target[i]``: the product of ``bags[b]`` and the row at place i of bag b; 0 where the place is skipped."""
    for bag in range(bags.shape[0]):
        for i in range(offsets[bag], offsets[bag + 1]):
            total = np.float32(0.0)
            if places[i] != skipped:
                for k in range(bags.shape[1]):
                    total += bags[bag, k] * rows[places[i], k]
            target[i] = total
