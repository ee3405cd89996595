"""The example follower through ps-run: its copy is equal to the shards at the end, and it says so when it is not."""

from __future__ import annotations

import argparse

import numpy as np

from ps_protocol.feed.reader import Change
from ps_worker.feed import TableCopy
from tests.cli import forked
from tests.examples.test_examples import EXAMPLES, load_example
from tests.support.length import choose
from tests.support.tables import array, table_spec


def test_the_copy_of_a_follower_is_equal_to_the_shards_when_training_is_over(tmp_path):
    job = ("--shards", "2", "--workers", "2", "--evaluators", "1", "--mode", "ssp", "--staleness", "2")
    script = (str(EXAMPLES / "follow_table.py"), "--steps", choose("120", "60"))
    done = forked.run(tmp_path, "--no-progress", "--seed", "1", *job, *script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rows: equal to the shards" in done.stdout
    assert "following: " in done.stdout


def test_what_differs_is_told(monkeypatch):
    example = load_example("follow_table")
    held = array(1, 2, 3), np.array([[1, 1], [2, 2], [3, 3]], np.float32)
    told = array(2, 3, 4), np.array([[2, 2], [3, 4], [4, 4]], np.float32)
    copy, spec = TableCopy(), table_spec(dim=2)
    copy.apply(Change(0, spec, (), array(), *told, whole=True, cursor={}))
    shards = [Change(0, spec, (), array(), *held, whole=True, cursor={})]
    # Changes that came late: the shards are read again.
    late = [Change(0, spec, (), array(9), array(), np.empty((0, 2), np.float32), whole=True, cursor={})]
    answers = [shards, late, shards, []]
    monkeypatch.setattr(example, "follow_table", lambda *_, **__: answers.pop(0))
    args = argparse.Namespace(table="ads", model="model")
    assert example.compare("nowhere", args, copy) == "1 missing, 1 too many, 1 with other values"
    assert not answers
