"""Ratios are a pure function of rows."""

from __future__ import annotations

import pytest

from benchmarks import catalog, floor, memory, ours, overlap
from benchmarks.peers import raw_socket, torch_rpc
from benchmarks.ratios import Ratio, ratios
from benchmarks.rows import GB, MB, Key, Measures
from benchmarks.timing import Figures

BULK, SHM, GRPC = map(ours.system, ours.TRANSPORTS[1::-1] + ours.TRANSPORTS[2:])


def figures(*rounds: float) -> Figures:
    return Figures.of([[seconds] for seconds in rounds])


def seconds(*rounds: float) -> Measures:
    return {"seconds": figures(*rounds)}


def only(found: list[Ratio], words: str) -> Ratio:
    (ratio,) = (ratio for ratio in found if words in ratio.title)
    return ratio


def test_a_rate_against_another_is_the_other_time_over_mine() -> None:
    rows = {
        Key(raw_socket.SYSTEM, raw_socket.BOTH, 100 * MB): seconds(0.06),
        Key(BULK, ours.STEP, 100 * MB): seconds(0.08),
    }
    assert ratios(rows) == [
        Ratio("step with bulk: rate against a raw socket, 100 MB", 0.75, 0.75, 0.75, "≥ 0.95", reached=False)
    ]


def test_a_ratio_is_the_median_of_its_rounds_with_their_range() -> None:
    rows = {
        Key(torch_rpc.TCP, torch_rpc.STEP, GB): seconds(3.0, 8.0, 2.0),
        Key(BULK, ours.STEP, GB): seconds(1.0, 4.0, 2.0),
    }
    ratio = only(ratios(rows), "faster than torch RPC over TCP, 1 GB")
    assert (ratio.value, ratio.low, ratio.high, ratio.reached) == (2.0, 1.0, 3.0, True)


def test_the_floor_is_the_sum_of_its_parts_in_the_same_round() -> None:
    rows = {
        Key(SHM, ours.STEP, 100 * MB): seconds(15.0, 30.0),
        Key(floor.SYSTEM, floor.APPLY, 100 * MB): seconds(6.0, 12.0),
        Key(floor.SYSTEM, floor.COPY, 100 * MB): seconds(4.0, 8.0),
    }
    ratio = only(ratios(rows), "against fused SGD and one memory copy")
    assert (ratio.value, ratio.target, ratio.reached) == (1.5, "≤ 1.15", False)


def test_sizes_that_nothing_is_asked_of_are_shown_without_a_verdict() -> None:
    rows = {
        Key(torch_rpc.SHM, torch_rpc.STEP, 10 * MB): seconds(2.0),
        Key(SHM, ours.STEP, 10 * MB): seconds(1.0),
    }
    ratio = only(ratios(rows), "10 MB")
    assert (ratio.value, ratio.target, ratio.reached) == (2.0, "", None)


@pytest.mark.parametrize("nbytes", catalog.THOUSAND_SIZES)
def test_a_thousand_tensors_are_held_against_one_of_the_same_transport(nbytes: int) -> None:
    rows = {
        Key(GRPC, ours.STEP, nbytes): seconds(2.0),
        Key(SHM, ours.STEP, nbytes): seconds(1.0),
        Key(GRPC, ours.STEP, nbytes, tensors=1000): seconds(2.1),
    }
    ratio = only(ratios(rows), "1,000 tensors against 1")
    assert "grpc" in ratio.title
    assert ratio.value == pytest.approx(1.05)
    assert ratio.reached


def test_overlap_and_memory_are_read_from_measures_of_their_own() -> None:
    size = 100 * MB
    rows: dict[Key, Measures] = {
        Key(BULK, overlap.OPERATION, size): {"seconds": figures(1.1), "compute_seconds": figures(1.0)},
        Key(BULK, memory.OPERATION, 100 * MB, workers=2): {"peak_bytes": figures(9.0), "bound_bytes": figures(10.0)},
    }
    found = ratios(rows)
    assert (only(found, "overlapped").value, only(found, "overlapped").reached) == (1.1, True)
    assert (only(found, "memory").value, only(found, "memory").reached) == (0.9, True)


def test_a_ratio_with_a_row_missing_is_left_out() -> None:
    assert ratios({Key(BULK, ours.STEP, 100 * MB): seconds(1.0)}) == []
