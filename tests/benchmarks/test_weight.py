"""What ``python -m benchmarks.weight`` counts."""

import ast
from pathlib import Path

from click.testing import CliRunner

from benchmarks import weight

MODULE = '''"""Describes.

The module.
"""

from __future__ import annotations

import time  # a comment

WAIT_SECONDS: float = 3.0
"""For an answer."""

text = """two
lines"""


class Waiting:
    """Waits."""

    #: Of one wait.
    LONGEST_SECONDS = 5.0
    SHORTEST_SECONDS: float

    def wait(self) -> None:
        """Wait."""
        local_SECONDS = 1
        time.sleep(local_SECONDS)
'''


def test_comments_docstrings_and_blank_lines_are_no_code():
    # Two imports, two names over three lines, the class, its two names, and three lines of its function.
    assert weight.code_lines(MODULE) == 11


def test_constants_of_modules_and_classes_count_and_names_without_a_value_do_not():
    assert list(weight.seconds_constants(ast.parse(MODULE))) == ["WAIT_SECONDS", "LONGEST_SECONDS"]


def test_a_module_counts_once_for_each_other_module_that_imports_it():
    trees = {
        Path("ps_server/a.py"): ast.parse("from ps_server.b import x\nfrom ps_server.b import y\nimport os"),
        Path("ps_server/c/__init__.py"): ast.parse("from ps_server import a, b\nimport ps_server.c"),
        Path("protos/ps_protocol/d.py"): ast.parse("import ps_server.a"),
        Path("ps_server/b.py"): ast.parse(""),
    }
    assert weight.importers(trees) == {"ps_server.b": 2, "ps_server.a": 2}


def test_a_tree_is_counted_and_compared_with_another_one(tmp_path, monkeypatch):
    for name, text in {
        "ps_server/a.py": "x = 1\n",
        "ps_worker/b.py": "import ps_server.a\n",
        "protos/ps_protocol/c_pb2.py": "y = 1\n",
        "tests/test_a.py": "\n\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert weight.weigh(tmp_path) == weight.Weight(
        code_lines=2, files=2, modules_with_one_importer=1, seconds_constants=0, test_lines=2
    )
    monkeypatch.setattr(weight.weigh, "__defaults__", (tmp_path,))
    shown = CliRunner().invoke(weight.main, [str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith("this tree")
    assert str(tmp_path) in shown.output
