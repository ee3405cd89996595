"""Every record above debug names an event, and docs/monitoring.md lists the events. Costs 2 s of CPU."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from ps_protocol.logs import EVENTS, LogEvent

ROOT = Path(__file__).parents[2]
PACKAGES = ("ps_server", "ps_worker", "protos/ps_protocol")
PAGE = ROOT / "docs" / "monitoring.md"
ABOVE_DEBUG = {"info", "warning", "error", "exception", "critical", "log"}


@pytest.fixture(scope="module")
def modules() -> dict[Path, ast.Module]:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "_pb2" not in path.name]
    return {path.relative_to(ROOT): ast.parse(path.read_text()) for path in paths}


def log_calls(module: ast.Module) -> Iterator[ast.Call]:
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ABOVE_DEBUG:
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id in {"log", "logger", "logging"}:
                yield node


def test_only_the_event_logger_writes_records_above_debug(modules):
    """mypy checks the names that it is given."""
    unnamed = []
    for path, module in modules.items():
        named = {
            target.id
            for node in module.body
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("EventLogger(")
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        reports = any(
            isinstance(node, ast.ImportFrom) and node.module == "ps_worker.session.reporting" for node in module.body
        )
        named |= {"log"} if reports else set()
        unnamed += [
            f"{path}:{call.lineno}"
            for call in log_calls(module)
            if ast.unparse(call.func).split(".")[0] not in named and path.name != "logs.py"
        ]
    assert unnamed == []


def test_every_event_is_logged_somewhere(modules):
    found = {
        node.value
        for path, module in modules.items()
        if path.name != "logs.py"
        for node in ast.walk(module)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    } | {"uncaught"}
    assert sorted(set(get_args(LogEvent)) - found) == []


def test_the_page_explains_every_event():
    _, table = PAGE.read_text().split("<!-- events -->\n")
    rows = re.findall(r"^\| `([\w.]+)` \| \S.* \|$", table.partition("<!-- /events -->")[0], re.MULTILINE)
    assert sorted(rows) == sorted(EVENTS), "docs/monitoring.md: one row for each event"
