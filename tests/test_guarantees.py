"""Every promise in docs/guarantees.md stands beside a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "guarantees.md").read_text()
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_test_named_there_exists():
    named = NAMED.findall(TEXT)
    assert len(named) > 50
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}, (
            f"{file}::{name}"
        )


def test_every_promise_has_a_test():
    promises = TEXT.partition("## Random faults")[0]
    rows = [line for line in promises.splitlines() if line.startswith("| ") and "| shown by |" not in line]
    assert rows
    assert [row for row in rows if not NAMED.search(row)] == []
