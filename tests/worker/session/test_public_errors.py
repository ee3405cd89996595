"""Every error that a public docstring of the SDK names can be imported from it, and has its line in docs/errors.md."""

from __future__ import annotations

import builtins
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import ps_worker
from ps_protocol import errors
from ps_protocol.wire.convert.errors import by_code
from tests.support import site

DOCS = Path(__file__).parents[3] / "docs"
ERRORS_PAGE = (DOCS / "errors.md").read_text()
BRANCHES = {errors.PsError, errors.Retryable, errors.Refused}

TREE = {name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}


def documented(owner: object, name: str) -> Iterator[tuple[str, str]]:
    """The docstrings that a user meets below ``owner``, each with its name."""
    yield name, inspect.getdoc(owner) or ""
    if isinstance(owner, ModuleType):
        public = getattr(owner, "__all__", None) or [each for each in vars(owner) if not each.startswith("_")]
        members = [(each, getattr(owner, each)) for each in public]
    elif isinstance(owner, type):
        members = [(each, value) for each, value in inspect.getmembers(owner) if not each.startswith("_")]
    else:
        return
    for each, member in members:
        home = member.__name__ if isinstance(member, ModuleType) else inspect.getmodule(getattr(member, "fget", member))
        if str(getattr(home, "__name__", home)).startswith(("ps_worker", "ps_protocol")):
            yield from documented(member, f"{name}.{each}")


DOCUMENTED = dict(documented(ps_worker, "ps_worker"))


def test_the_walk_meets_what_users_call() -> None:
    expected = ("connect", "Cluster.optimizer", "Optimizer.step", "tables.Table", "rows.Adagrad", "feed.follow_table")
    assert {f"ps_worker.{name}" for name in expected} <= set(DOCUMENTED)


def errors_named_by(text: str) -> set[str]:
    """Also a name that no class has, as after a rename."""
    named = {word for word in re.findall(r"\w+", text) if word in TREE}
    raised = re.findall(r"\bRaises (\w+)", text) + re.findall(
        r"^ {4}(\w+):", text.partition("\nRaises:\n")[2], re.MULTILINE
    )
    return named | {word for word in raised if word[0].isupper() and not hasattr(builtins, word)}


def test_errors_that_public_docstrings_name_can_be_imported() -> None:
    named = {(name, word) for name, text in DOCUMENTED.items() for word in errors_named_by(text)}
    assert {word for _, word in named} & TREE.keys()
    assert [(name, word) for name, word in sorted(named) if not hasattr(ps_worker, word)] == []


def test_public_names_have_docstrings() -> None:
    assert [name for name, text in DOCUMENTED.items() if not text] == []


def test_the_reference_shows_every_public_name() -> None:
    shown = set(re.findall(r"^::: ps_worker\.(\w+)$", (DOCS / "reference" / "python.md").read_text(), re.MULTILINE))
    assert sorted(shown) == sorted(set(ps_worker.__all__) - set(TREE))


@pytest.mark.parametrize("package", site.EXTRAS)
def test_the_reference_shows_the_classes_of_an_extra(package: str) -> None:
    source = (DOCS.parent / "ps_worker" / package / "__init__.py").read_text()  # the extra may not be installed
    public = re.findall(r'"(\w+)"', re.findall(r"^__all__ = \[(.*)\]$", source, re.MULTILINE)[0])
    page = (DOCS / "reference" / "python.md").read_text()
    assert sorted(re.findall(rf"^::: ps_worker\.{package}\.(\w+)$", page, re.MULTILINE)) == public


def test_the_whole_tree_is_public() -> None:
    assert {name: getattr(ps_worker, name, None) for name in TREE} == TREE


def test_each_kind_is_where_the_page_puts_it() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", ERRORS_PAGE, re.MULTILINE)
    on_page = [name for row in rows for name in re.findall(r"\w+", row)]
    assert sorted(on_page) == sorted(name for name, kind in TREE.items() if kind not in BRANCHES)
    for branch in (errors.Retryable, errors.Refused):
        section = re.split(rf"^## .*`{branch.__name__}`.*$", ERRORS_PAGE, flags=re.MULTILINE)[1].partition("\n## ")[0]
        for row in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", section, re.MULTILINE):
            assert all(issubclass(TREE[name], branch) for name in re.findall(r"\w+", row))


@pytest.mark.parametrize("branch", [errors.Retryable, errors.Refused])
def test_a_branch_has_no_code_of_its_own(branch: type[errors.PsError]) -> None:
    assert "code" not in vars(branch)
    assert branch not in by_code.values()
    assert issubclass(branch, errors.PsError)
