"""The examples, and the Python of the pages for users, import the public modules of ``ps_worker`` and nothing else."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ps_worker

ROOT = Path(__file__).parents[2]

PUBLIC = {
    "ps_worker",
    "ps_worker.admin",
    "ps_worker.feed",
    "ps_worker.huggingface",
    "ps_worker.lightning",
    "ps_worker.optimizers",
    "ps_worker.ray",
    "ps_worker.rows",
    "ps_worker.security",
    "ps_worker.strategies.fit",
    "ps_worker.tables",
    "ps_worker.torchrl",
}

PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "decisions"),
]
SOURCES = sorted(
    file
    for folder in ("examples", "docs")
    for ending in ("py", "ipynb")
    for file in (ROOT / folder).rglob(f"*.{ending}")
)

_BLOCK = re.compile(r"^( *)```(?:python|py)\b[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_IMPORT = re.compile(r"^\s*(?:from|import)\s+(ps_\w+(?:\.\w+)*)(?:\s+import\s+([^\n#]+))?", re.MULTILINE)


def private(code: str) -> list[str]:
    """The modules of torch-ps that ``code`` imports and that are not public."""
    try:
        return sorted(set(_imported(ast.parse(code))) - PUBLIC)
    except SyntaxError:  # a page leaves out parts of its code
        return sorted({found[1] for found in _IMPORT.finditer(code)} - PUBLIC)


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
            if node.module == "ps_worker":
                names += [f"ps_worker.{each.name}" for each in node.names if each.name not in ps_worker.__all__]
        yield from (name for name in names if name.startswith("ps_"))


def code_of(file: Path) -> str:
    """The Python of a script, of a notebook, or of the blocks of a page."""
    text = file.read_text()
    if file.suffix == ".md":
        return "\n".join(re.sub(rf"^{found[1]}", "", found[2], flags=re.MULTILINE) for found in _BLOCK.finditer(text))
    if file.suffix == ".ipynb":
        return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
    return text


@pytest.mark.parametrize("file", [*PAGES, *SOURCES], ids=lambda file: str(file.relative_to(ROOT)))
def test_what_users_read_imports_public_modules_only(file):
    assert private(code_of(file)) == []


def test_private_imports_are_found():
    assert private("import ps_worker\nfrom ps_worker import feed\nfrom ps_worker.tables import Table") == []
    assert private("from ps_worker.tables.table import Table") == ["ps_worker.tables.table"]
    assert private("from ps_worker import connect, session") == ["ps_worker.session"]
    assert private("def f():\n    import ps_server.cli") == ["ps_server.cli"]
    assert private("if:\nfrom ps_protocol.errors import PsError") == ["ps_protocol.errors"]
