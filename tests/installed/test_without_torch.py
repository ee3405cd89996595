"""Commands where torch is not installed: those that need none run, the others say what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run_without_torch(program: str) -> subprocess.CompletedProcess[str]:
    """Like an environment without torch and numba, for the imports of one process."""
    blocked = "import sys; sys.modules['torch'] = sys.modules['numba'] = None\n"
    return subprocess.run([sys.executable, "-c", blocked + program], capture_output=True, text=True)


@pytest.mark.parametrize("module", ["coordinator", "shard", "cli.launcher", "cli.psctl"])
def test_every_command_explains_itself(module):
    done = run_without_torch(f"from ps_server.{module}.main import main; main(['--help'])")
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout


def test_a_shard_says_what_to_install():
    arguments = ["--shard", "0", "--coordinator", "127.0.0.1:1"]
    done = run_without_torch(f"import ps_server.shard.main as m; m.main({arguments})")
    assert done.returncode != 0
    assert "torch is not installed" in done.stderr
    assert "pip install 'torch-ps[server]'" in done.stderr


def test_the_sdk_says_what_to_install():
    done = run_without_torch("import ps_worker")
    assert done.returncode != 0
    assert "pip install 'torch-ps[worker]'" in done.stderr.splitlines()[-1]
