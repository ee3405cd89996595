"""What the documentation names is there: files, folders, modules, tests, what to edit where. Its prose is wrapped."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import site

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]
TEXTS = sorted({*PAGES, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "examples" / "README.md"})
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


def test_every_link_leads_to_a_file_and_to_a_heading_there():
    pages = {str(page.relative_to(ROOT)): page.read_text() for page in TEXTS}
    assert {name: found for name, text in pages.items() if (found := list(site.broken_links(name, text)))} == {}


def test_links_to_what_is_not_there_are_found():
    text = "[a](nothing.md) [b](data.md#nope) [c](#here) [d](../README.md)\n# Here\n```\n[e](code.md)\n```\n"
    assert list(site.broken_links("docs/tables.md", "[old.md](data.md), [data.md](data.md#leases)")) == ["old.md"]
    assert list(site.broken_links("docs/tables.md", text)) == ["nothing.md", "data.md#nope"]


def test_links_to_sources_are_words_on_the_site_and_pages_elsewhere_have_places_there():
    text = "[a](../deploy/compose.yaml), [b](../README.md#modes), [c](https://x.org), [d](../benchmarks/README.md)"
    assert site.for_the_site("docs/x.md", text) == "a, [b](index.md#modes), [c](https://x.org), [d](benchmarks.md)"
    assert site.for_the_site("README.md", "[a](docs/decisions/README.md)") == "[a](decisions/README.md)"
    assert site.for_the_site("docs/decisions/1.md", "[a](../data.md)") == "[a](../data.md)"


def test_the_index_of_decisions_has_every_page_with_its_title():
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"^(\d+\. )\[(.*)\]\((.*?)\)", (folder / "README.md").read_text(), re.MULTILINE)
    titles = {path.name: path.read_text().partition("\n")[0] for path in folder.glob("0*.md")}
    assert {file: f"# {number}{title}" for number, title, file in listed} == titles


def test_the_site_leads_to_every_page():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = re.findall(r"^ +- (\S+\.md)$", nav, re.MULTILINE)
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    outside = [place for place in site.OUTSIDE.values() if place.endswith(".md")]
    assert sorted(listed) == sorted([*outside, *(page for page in pages if not page.startswith("decisions/0"))])


def test_the_python_on_pages_can_be_parsed():
    for page in TEXTS:
        for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            ast.parse(code, str(page))


def too_long(text: str) -> list[str]:
    """The lines of ``text`` that are longer than WIDTH: not those of tables and of code."""
    outside = re.sub(r"^( *)(```|~~~).*?^ *\2", "", text, flags=re.DOTALL | re.MULTILINE)
    return [line for line in outside.splitlines() if len(line) > WIDTH and not line.lstrip().startswith("|")]


def test_prose_is_wrapped():
    assert {str(path.relative_to(ROOT)): found for path in TEXTS if (found := too_long(path.read_text()))} == {}


def test_long_lines_are_found_outside_tables_and_code():
    line = "a " * 80
    assert too_long(f"short\n{line}\n| {line} |\n```sh\n{line}\n```\n- {line}") == [line, f"- {line}"]


# The table "Where do I …" of docs/architecture.md.

_TOKEN = re.compile(r"`([^`]+)`(?: \(((?:`[\w.]+`(?:, )?)+)\))?")


class Edit(NamedTuple):
    """A file or folder that a row sends its reader to, below the root, with the names to look for."""

    path: str
    names: tuple[str, ...]


class Row(NamedTuple):
    to: str
    edits: tuple[Edit, ...]
    files: str


def rows(page: str) -> list[Row]:
    return [Row(to, tuple(edits_of(edit)), files) for to, edit, files in cells(page, "Where do I …")]


def cells(page: str, heading: str) -> list[list[str]]:
    """The rows of the tables below a heading, without their heads."""
    lines = page.partition(f"## {heading}\n")[2].partition("\n## ")[0].splitlines()
    heads = {number + step for number, line in enumerate(lines) if line.startswith("|---") for step in (-1, 0)}
    tables = [line for number, line in enumerate(lines) if line[:1] == "|" and number not in heads]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in tables]


def edits_of(cell: str) -> Iterator[Edit]:
    """A name without a folder, or with one that is not at a root, is below the folder of the file before it."""
    folder = ""
    for word, names in _TOKEN.findall(cell):
        if not re.search(r"/|\.(py|proto|js|md)$", word):
            continue
        path = word if word.split("/")[0] in _FIRST and "/" in word else f"{folder}/{word}"
        path = next((root + path for root in _ROOTS if (ROOT / root / path).exists()), path)
        folder = path.rstrip("/") if word.endswith("/") else path.rpartition("/")[0]
        yield Edit(path, tuple(re.findall(r"`([\w.]+)`", names)))


def defined(path: str) -> set[str]:
    """What a file defines: classes, functions, constants, and the members of classes as ``Class.member``."""
    text = (ROOT / path).read_text()
    if not path.endswith(".py"):
        return set(re.findall(r"^(?:message|enum|service|  rpc) (\w+)", text, re.MULTILINE))
    return set(_names(ast.parse(text).body, ""))


def _names(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from _names(node.body, f"{node.name}.")
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


def wrong(row: Row) -> list[str]:
    """What a row says that is not so."""
    absent = [path for path, _ in row.edits if not (ROOT / path).exists()]
    unknown = [
        f"{name} in {path}"
        for path, names in row.edits
        if path not in absent
        for name in names
        if name not in defined(path)
    ]
    return absent + unknown + ([] if row.edits else ["it names no file"])


PAGE = (ROOT / "docs" / "architecture.md").read_text()
ARCHITECTURE = rows(PAGE)
FAILURES = [Row(to, tuple(edits_of(where)), "") for to, where in cells(PAGE, "The way of a failure")]
OWNERS = [cell for _, cell, _ in cells(PAGE, "Who owns what")]


@pytest.mark.parametrize("row", ARCHITECTURE + FAILURES, ids=lambda row: row.to)
def test_a_row_of_the_table_of_what_to_edit_names_files_that_exist_and_what_they_define(row):
    assert wrong(row) == []


def test_owners_are_classes_of_their_files():
    folder, wrong_owners, count = "", [], 0
    for path, name in re.findall(r"`([\w/]+\.py)`: `(\w+)`", "\n".join(OWNERS)):
        found = [each for root in (*_ROOTS, f"{folder}/") if (ROOT / (each := root + path)).exists()]
        wrong_owners += [] if any(name in defined(each) for each in found) else [f"{path}: {name}"]
        folder, count = (found or [folder])[0].rpartition("/")[0], count + 1
    assert wrong_owners == []
    assert count > 15


def test_files_and_folders_in_the_drawings_exist():
    drawing = PAGE.partition("## One step")[2].partition("##")[0]
    step = re.findall(r"(?<= )([a-z_]+(?:/[a-z_]+)*(?:/|\.py))(?=\s)", drawing)
    assert len(step) > 12
    assert [each for each in step if not any((ROOT / root / each).exists() for root in _ROOTS)] == []
    tree = PAGE.partition("## Folders")[2].split("```")[1]
    package, absent = "", []
    for line in tree.splitlines():
        if line[:1].strip():
            package = line.split()[0]
        absent += [
            each
            for each in re.findall(r"(?:^|(?<=[ ;]))(?:[a-z_0-9]+/|[a-z_]+\.py)(?=[ ;,]|$)", line.removeprefix(package))
            if not any((ROOT / package / folder / each).exists() for folder in ("", *re.findall(r"[a-z_0-9]+/", line)))
        ]
    assert absent == []


def test_rows_that_name_what_is_not_there_are_found():
    row = (
        "| add x | `ps_worker/rows.py` (`Init`, `Nothing`), `nothing.py`; `ps_protocol/v1/shard.proto` (`Never`) | 3 |"
    )
    (found,) = rows(f"## Where do I …\n| to | edit | files |\n|---|---|---|\n{row}\n")
    assert wrong(found) == [
        "ps_worker/nothing.py",
        "Nothing in ps_worker/rows.py",
        "Never in protos/ps_protocol/v1/shard.proto",
    ]


#: What is there already of a kind, by the row that adds one more.
SPECIMENS = {
    "add a row optimizer": "ftrl",
    "add a codec (wire format)": "topk",
    "add a rule for stale gradients": "reject",
}


def files_with(name: str) -> set[str]:
    """The sources that use ``name`` in an identifier or as a string, in any case: not those with words about it."""
    packages = (ROOT / "ps_server", ROOT / "ps_worker", ROOT / "protos")
    sources = {file for package in packages for file in package.rglob("*.py") if file.parent.name != "v1"}
    found = {file for file in sources if name in file.read_text().lower() and name in _used(file)}
    found |= {file for file in (ROOT / "protos").rglob("*.proto") if name in file.read_text().lower()}
    return {str(file.relative_to(ROOT)) for file in found}


def _used(file: Path) -> str:
    with file.open("rb") as lines:
        tokens = [
            token for token in tokenize.tokenize(lines.readline) if token.type in (tokenize.NAME, tokenize.STRING)
        ]
    return " ".join(token.string.lower() for token in tokens if " " not in token.string)


@pytest.mark.parametrize("to", SPECIMENS)
def test_a_row_of_the_table_names_every_file_that_an_addition_takes(to):
    (row,) = [row for row in ARCHITECTURE if row.to == to]
    folders = tuple(path for path, _ in row.edits if path.endswith("/"))
    files = {path for path, _ in row.edits} - set(folders)
    elsewhere = {path for path in files_with(SPECIMENS[to]) if path in files or not path.startswith(folders or ("/",))}
    assert elsewhere == files
    count = len([path for path in files if path.endswith(".py")]) + len(folders)
    assert row.files == str(count) + (" + .proto" if any(path.endswith(".proto") for path in files) else "")


def test_the_compatibility_page_has_the_numbers_of_the_formats():
    table = (ROOT / "docs" / "compatibility.md").read_text().partition("## Numbers of this version")[2]
    rows_of_numbers = re.findall(r"^\| [^(|]*\(`([\w/.]+)`\) \| (\d+) \|$", table, re.MULTILINE)
    assert len(rows_of_numbers) > 4
    for path, number in rows_of_numbers:
        source = next(ROOT / root / path for root in _ROOTS if (ROOT / root / path).exists())
        assert re.findall(r"^(?:PROTOCOL_VERSION|FORMAT) = (\d+)$", source.read_text(), re.MULTILINE) == [number], path
    protocol = dict(rows_of_numbers)["ps_protocol/__init__.py"]
    assert f"Version {protocol}. " in (ROOT / "docs" / "protocol.md").read_text()
