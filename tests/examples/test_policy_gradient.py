"""The policy gradient through ps-run: one trainer learns from actors that follow its published policy."""

from __future__ import annotations

from tests.cli import forked
from tests.examples.test_examples import EXAMPLES
from tests.support.length import choose


def test_actors_that_follow_the_policy_teach_the_trainer(tmp_path):
    job = ("--shards", "2", "--workers", "1", "--evaluators", choose("4", "2"))
    script = (str(EXAMPLES / "policy_gradient.py"), "--updates", choose("120", "30"), "--expect-return", "0.8")
    done = forked.run(tmp_path, "--no-progress", "--seed", "1", *job, *script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(expected at least 0.8)" in done.stdout
