"""Every promise in docs/guarantees.md stands beside a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "guarantees.md").read_text()
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def functions(file: Path) -> set[str]:
    body = ast.parse(file.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_test_named_there_exists():
    named = NAMED.findall(TEXT)
    assert len(named) > 50
    there = {(file, name) for file in {file for file, _ in named} for name in functions(ROOT / file)}
    assert sorted(set(named) - there) == []


def test_every_promise_has_a_test():
    promises = TEXT.partition("## Random faults")[0]
    rows = [line for line in promises.splitlines() if line.startswith("| ") and "| shown by |" not in line]
    assert rows
    assert [row for row in rows if not NAMED.search(row)] == []
