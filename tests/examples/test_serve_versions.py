"""The example server through ps-run: rows and weights of its last version predict."""

from __future__ import annotations

import re

from tests.cli import forked
from tests.examples.test_examples import EXAMPLES
from tests.support.length import choose


def test_the_last_version_predicts_with_its_rows(tmp_path):
    steps = choose("300", "100")
    job = ("--shards", "2", "--workers", "2", "--evaluators", "1", "--mode", "sync")
    script = (str(EXAMPLES / "serve_versions.py"), "--steps", steps, "--expect-accuracy", "0.9")
    done = forked.run(tmp_path, "--no-progress", "--seed", "1", *job, *script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"step (\d+):", done.stdout)[-1] == steps
