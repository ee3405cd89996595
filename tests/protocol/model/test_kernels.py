"""Compiled loops work on every disk: machine code is kept where that is possible, and it is said while it is made."""

from __future__ import annotations

import errno
import logging
import re
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba.core import caching

from ps_protocol.model import kernels
from ps_protocol.model.kernels import kernel, on_kernel


@pytest.fixture(autouse=True)
def nothing_said():
    """What is said once per process is said once per test."""
    yield
    kernels._say_compiling.cache_clear()
    kernels._say_not_kept.cache_clear()


def doubled(value: Any) -> Any:
    return 2 * value


def read_only(*_: Any) -> None:
    raise OSError(errno.EROFS, "Read-only file system")


def test_where_no_folder_can_be_written_each_process_compiles_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(caching._CacheLocator, "ensure_cache_path", read_only)
    with caplog.at_level(logging.WARNING):
        assert kernel("int64(int64)")(doubled)(21) == 42
        assert kernel("int64(int64)")(doubled)(4) == 8
    assert len(caplog.messages) == 1
    assert "NUMBA_CACHE_DIR" in caplog.messages[0]


def test_a_full_disk_costs_the_next_start_and_not_this_one(monkeypatch, caplog, tmp_path):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(caching.IndexDataCacheFile, "save", full)
    with caplog.at_level(logging.WARNING):
        assert kernel("int64(int64)")(doubled)(21) == 42
    assert "No space left" in caplog.text
    assert "NUMBA_CACHE_DIR" in caplog.text


def test_what_an_earlier_process_compiled_is_loaded_without_a_word(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        kernel("int64(int64)")(doubled)
        assert re.fullmatch(rf"compiling what tables need: .*{re.escape(str(tmp_path))}.*", *caplog.messages)
        kernels._say_compiling.cache_clear()
        caplog.clear()
        assert kernel("int64(int64)")(doubled)(21) == 42
    assert not caplog.messages


def test_the_context_that_imports_kernels_is_told_of_each(monkeypatch, tmp_path):
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    told: list[str] = []
    token = on_kernel.set(told.append)
    try:
        kernel("int64(int64)")(doubled)
    finally:
        on_kernel.reset(token)
    assert told == ["doubled"]


def test_no_kernel_names_its_cache_itself():
    root = Path(__file__).parents[3]
    sources = [each for room in ("ps_server", "ps_worker", "protos") for each in (root / room).rglob("*.py")]
    assert not [each.name for each in sources if "cache=True" in each.read_text()]


def summed(rows: Any) -> Any:
    total = 0.0
    for i in range(rows.shape[0]):
        total += first_of(rows, i)
    return total


@numba.njit(inline="always")
def first_of(rows: Any, i: Any) -> Any:
    return rows[i, 0]


def test_a_kernel_that_allocates_nothing_counts_no_references_to_arrays(monkeypatch, tmp_path):
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    made = kernel("float64(float64[:, ::1])")(summed)
    rows = np.ones((5, 2))
    before = sys.getrefcount(rows)
    assert made(rows) == 5.0
    assert sys.getrefcount(rows) == before
    [code] = made.inspect_llvm().values()
    assert "NRT_incref" not in code


def test_a_kernel_that_makes_arrays_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    with pytest.raises(numba.core.errors.NumbaError):
        kernel("int64[::1](int64)")(zeros)
    made = kernel("int64[::1](int64)", allocates=True)(zeros)
    assert made(3).tolist() == [0, 0, 0]


def zeros(count: Any) -> Any:
    return np.zeros(count, np.int64)
