"""What the documentation names is there: files, folders, modules, tests. Its prose is wrapped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
TEXTS = sorted({*PAGES, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")})
WIDTH = 120

_FILE = re.compile(r"`([\w./-]+/[\w./-]*)`")
_MODULE = re.compile(r"`((?:ps_server|ps_worker|ps_protocol)(?:\.\w+)+)`")
_ROOTS = ("", "protos/", "ps_server/", "ps_worker/", "docs/", "benchmarks/")
#: Made by programs.
_MADE = re.compile(r"\.json$|^benchmarks/results/")
_FIRST = {path.name for root in _ROOTS for path in (ROOT / root).iterdir()}


def missing(text: str) -> list[str]:
    """Paths of the project and modules that ``text`` names in backticks and that do not exist."""
    paths = [found for found in _FILE.findall(text) if found.split("/")[0] in _FIRST and not _MADE.search(found)]
    modules = [found for found in _MODULE.findall(text) if not _is_module(found)]
    return [path for path in paths if not any((ROOT / root / path).exists() for root in _ROOTS)] + modules


def _is_module(name: str) -> bool:
    """Whether a prefix of two or more words is a module or package, or the name is one that a package exports."""
    words = name.split(".")
    for count in range(len(words), 1, -1):
        path = "/".join(words[:count])
        if any((ROOT / root / path).is_dir() or (ROOT / root / f"{path}.py").exists() for root in _ROOTS):
            return True
    return len(words) == 2 and f'"{words[1]}"' in (ROOT / words[0] / "__init__.py").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page):
    assert missing(page.read_text()) == []


def test_names_of_what_is_not_there_are_found():
    assert missing("`ps_server/shard/nothing.py` and `ps_server.shard.process`") == ["ps_server/shard/nothing.py"]
    assert missing("`ps_worker.nothing`, `ps_worker.connect`") == ["ps_worker.nothing"]


def too_long(text: str) -> list[str]:
    """The lines of ``text`` that are longer than WIDTH: not those of tables and of code."""
    outside = re.sub(r"^( *)(```|~~~).*?^ *\2", "", text, flags=re.DOTALL | re.MULTILINE)
    return [line for line in outside.splitlines() if len(line) > WIDTH and not line.lstrip().startswith("|")]


def test_prose_is_wrapped():
    assert {str(path.relative_to(ROOT)): found for path in TEXTS if (found := too_long(path.read_text()))} == {}


def test_long_lines_are_found_outside_tables_and_code():
    line = "a " * 80
    assert too_long(f"short\n{line}\n| {line} |\n```sh\n{line}\n```\n- {line}") == [line, f"- {line}"]
