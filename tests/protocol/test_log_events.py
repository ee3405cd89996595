"""Every message of the packages has an event that is known, and docs/logs.md lists them all. Costs 2 s of CPU."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from ps_protocol.log_events import BY_BEGINNING, EVENTS, KEY_CHARACTERS, events_table

ROOT = Path(__file__).parents[2]
PACKAGES = ("ps_server", "ps_worker", "protos/ps_protocol")
PAGE = ROOT / "docs" / "logs.md"
BEGIN, END = "<!-- events -->\n", "<!-- /events -->\n"

LOGGERS = {"log", "logger"}
METHODS = {"info", "warning", "error", "exception", "critical", "log"}
OF_ERRORS = "%s"
"""A message that is an error has the error's class as its event."""


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "_pb2" not in path.name:
                for node in ast.walk(ast.parse(path.read_text())):
                    yield path.relative_to(ROOT), node


def is_log_call(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in METHODS
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in LOGGERS
    )


def message_of(call: ast.Call, path: Path) -> str:
    assert isinstance(call.func, ast.Attribute)
    given = call.args[1 if call.func.attr == "log" else 0]
    if isinstance(given, ast.Name):
        given = constant_of(path, given.id)
    assert isinstance(given, ast.Constant), f"{path}: the text of a message is a constant, not {ast.unparse(given)}"
    return str(given.value)


def constant_of(path: Path, name: str) -> ast.AST:
    """What the module assigns to ``name``."""
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.Assign) and [each.id for each in node.targets if isinstance(each, ast.Name)] == [name]:
            return node.value
    raise AssertionError(f"{path} has no constant {name}")


def constants(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, str], dict[str, str]]:
    """Places by the messages that name no event, and by the events that are named."""
    messages: dict[str, str] = {}
    events: dict[str, str] = {}
    for path, node in nodes():
        if is_log_call(node):
            assert isinstance(node, ast.Call)
            if not any(keyword.arg == "extra" for keyword in node.keywords):
                messages[message_of(node, path)] = f"{path}:{node.lineno}"
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "event" and isinstance(value, ast.Constant):
                    events[str(value.value)] = f"{path}:{node.lineno}"
        if isinstance(node, ast.keyword) and node.arg == "event" and "launcher" in path.parts:
            events |= dict.fromkeys(constants(node.value), f"{path}:{node.value.lineno}")
    return messages, events


def test_every_message_has_an_event(found):
    messages, _ = found
    unknown = {
        text: place
        for text, place in messages.items()
        if text != OF_ERRORS and text[:KEY_CHARACTERS] not in BY_BEGINNING
    }
    assert unknown == {}, "give each a line in protos/ps_protocol/log_events.py"


def test_every_event_that_is_named_is_known(found):
    _, events = found
    assert {"uncaught", "barrier.released", "psctl.note", "status"} <= events.keys()
    assert {event: place for event, place in events.items() if event not in EVENTS} == {}


def test_no_line_is_left_of_a_message_that_is_gone(found):
    messages, _ = found
    beginnings = {text[:KEY_CHARACTERS] for text in messages}
    assert sorted(BY_BEGINNING.keys() - beginnings) == []


def test_events_of_messages_are_known():
    assert sorted(set(BY_BEGINNING.values()) - EVENTS.keys()) == []


def test_the_page_has_the_table():
    text, table = PAGE.read_text(), events_table()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == table, "put this there:\n" + table
