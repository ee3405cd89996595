"""One class per name: a reader who finds a name in one of the three packages has found what it means in all of them."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("ps_server", "ps_worker", "protos/ps_protocol")

SHIPPED = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py") if file.parent.name != "v1"]


def classes(text: str) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]


def namesakes(sources: dict[str, str]) -> dict[str, list[str]]:
    """Public classes that more than one file defines, with the files."""
    files = defaultdict(list)
    for file, text in sources.items():
        for name in classes(text):
            if not name.startswith("_"):
                files[name].append(file)
    return {name: found for name, found in files.items() if len(found) > 1}


def test_no_two_public_classes_share_a_name():
    assert namesakes({str(file.relative_to(ROOT)): file.read_text() for file in SHIPPED}) == {}


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        ({"a": "class Part: ...", "b": "class Part: ..."}, {"Part": ["a", "b"]}),
        ({"a": "class Part:\n    class Piece: ...", "b": "class Piece: ..."}, {"Piece": ["a", "b"]}),
        ({"a": "class _Part: ...", "b": "class _Part: ..."}, {}),
    ],
)
def test_namesakes_are_found(sources, found):
    assert namesakes(sources) == found
