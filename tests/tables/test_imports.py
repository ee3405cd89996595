"""Who has no tables does not wait for the compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["ps_worker", "ps_server.shard.main", "ps_server.coordinator.main", "ps_server.cli.launcher.main"]
)
def test_compiled_code_is_imported_at_its_first_use_only(module):
    code = f"import sys, {module}; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
