"""What importing the SDK does to the process."""

from __future__ import annotations

import gc
import runpy

import pytest

import ps_worker


@pytest.mark.parametrize(("environment", "frozen"), [({"PS_RANK": "0"}, 1), ({}, 0)])
def test_only_in_a_process_of_a_job_what_was_imported_is_kept(monkeypatch, environment, frozen):
    calls = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.delenv("PS_RANK", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    runpy.run_path(ps_worker.__file__)
    assert len(calls) == frozen
