"""Curves: every value counts, memory is fixed, merged points keep means and bounds."""

from __future__ import annotations

import math

import pytest

from ps_server.coordinator.history.curve_book import CurveBook, Spread
from tests.support.seeds import seeded


def one(value: float) -> Spread:
    spread = Spread()
    spread.take(value, value, value)
    return spread


LOSS = ("loss", True)


def test_each_look_is_a_point_until_the_book_is_full() -> None:
    book = CurveBook(1.0, points=8)
    for second in range(5):
        book.add(100.0 + second, {LOSS: one(second)})
    curves = book.curves()
    (loss,) = curves.curves
    assert list(curves.times) == [100, 101, 102, 103, 104]
    assert (list(loss.mean), list(loss.low), list(loss.high)) == ([0, 1, 2, 3, 4],) * 3
    assert (loss.name, loss.reported, curves.point_seconds, curves.generation) == ("loss", True, 1.0, 0)


def test_looks_within_one_point_are_a_mean_with_bounds() -> None:
    book = CurveBook(10.0, points=8)
    for second, value in enumerate((1.0, 5.0, 3.0)):
        book.add(float(second), {LOSS: one(value)})
    (loss,) = book.curves().curves
    assert (list(loss.mean), list(loss.low), list(loss.high)) == ([3.0], [1.0], [5.0])


def test_a_full_book_merges_neighbours_and_keeps_their_bounds() -> None:
    book = CurveBook(1.0, points=4)
    for second in range(6):
        book.add(float(second), {LOSS: one(second)})
    curves = book.curves()
    (loss,) = curves.curves
    assert curves.point_seconds == 2.0
    assert curves.generation == 1
    assert list(curves.times) == [0, 2, 4]
    assert (list(loss.mean), list(loss.low), list(loss.high)) == ([0.5, 2.5, 4.5], [0, 2, 4], [1, 3, 5])


def test_names_that_come_late_or_stay_away_have_holes() -> None:
    book = CurveBook(1.0, points=8)
    book.add(0.0, {LOSS: one(1.0)})
    book.add(1.0, {("auc", True): one(0.5)})
    book.add(2.0, {})
    by_name = {each.name: list(each.mean) for each in book.curves().curves}
    assert by_name["loss"][0] == 1.0
    assert [math.isnan(value) for value in by_name["loss"]] == [False, True, True]
    assert [math.isnan(value) for value in by_name["auc"]] == [True, False, True]


def test_names_beyond_the_limit_are_left_out() -> None:
    book = CurveBook(1.0, points=4, names=2)
    book.add(0.0, {(f"n{number}", True): one(1.0) for number in range(5)})
    assert len(book.curves().curves) == 2


def test_no_odd_number_of_points() -> None:
    for points in (0, 1, 3):
        with pytest.raises(ValueError, match="even"):
            CurveBook(1.0, points=points)


def test_a_long_job_has_bounded_curves_over_all_of_its_time() -> None:
    draw = seeded()
    points = draw.choice([4, 10, 64])
    book, now, seen = CurveBook(1.0, points=points), 1000.0, []
    for _ in range(3000):
        now += draw.choice([0.5, 1.0, 1.0, 7.0])
        value = draw.uniform(-5, 5)
        seen.append(value)
        book.add(now, {LOSS: one(value)})
    curves = book.curves()
    (loss,) = curves.curves
    assert len(curves.times) == len(loss.mean) == len(loss.low) == len(loss.high) <= points
    assert list(curves.times) == sorted(curves.times)
    assert min(loss.low) == min(seen)
    assert max(loss.high) == max(seen)
    assert all(low <= mean <= high for low, mean, high in zip(loss.low, loss.mean, loss.high, strict=True))


def test_the_last_points_of_curves() -> None:
    book = CurveBook(1.0, points=8)
    for second in range(6):
        book.add(float(second), {LOSS: one(second)})
    last = book.curves().last(2)
    assert list(last.times) == [4, 5]
    assert list(last.curves[0].mean) == [4, 5]
    assert list(book.curves().last(99).times) == [0, 1, 2, 3, 4, 5]
