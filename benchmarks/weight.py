"""How much code there is, and how it hangs together: ``python -m benchmarks.weight``.

Lines of code are lines with at least one token that is neither a comment nor part of a docstring. Generated stubs count
as no code.
"""

from __future__ import annotations

import ast
import io
import json
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
SHIPPED = ("ps_server", "ps_worker", "protos/ps_protocol")

_NO_CODE = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)


@dataclass(frozen=True, slots=True)
class Weight:
    """Figures of one tree. All are counts."""

    code_lines: int
    files: int
    #: Modules that one other shipped module imports.
    modules_with_one_importer: int
    #: Names that end in _SECONDS and are assigned at the top of a module or class.
    seconds_constants: int
    test_lines: int


def weigh(root: Path = ROOT) -> Weight:
    """Count the files below ``root``, a checkout. Raises OSError, SyntaxError for what is not to be read."""
    texts = {path.relative_to(root): path.read_text() for path in shipped_files(root)}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    return Weight(
        code_lines=sum(code_lines(text) for text in texts.values()),
        files=len(texts),
        modules_with_one_importer=sum(count == 1 for count in importers(trees).values()),
        seconds_constants=sum(len(list(seconds_constants(tree))) for tree in trees.values()),
        test_lines=sum(len(path.read_text().splitlines()) for path in (root / "tests").rglob("*.py")),
    )


def shipped_files(root: Path) -> Iterator[Path]:
    """Python files of the three packages, without generated stubs."""
    for package in SHIPPED:
        for path in sorted((root / package).rglob("*.py")):
            if not path.stem.endswith(("_pb2", "_pb2_grpc")):
                yield path


def code_lines(text: str) -> int:
    """Lines of ``text`` that are neither blank, comment nor docstring."""
    docstrings = set(_docstring_lines(ast.parse(text)))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def seconds_constants(tree: ast.Module) -> Iterator[str]:
    """Names that end in ``_SECONDS`` and are assigned in ``tree`` or in one of its classes."""
    for body in (tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))):
        for node in body:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if _annotated(node) else []
            for target in targets:
                if isinstance(target, ast.Name) and target.id.endswith("_SECONDS"):
                    yield target.id


def importers(trees: dict[Path, ast.Module]) -> Counter[str]:
    """How many shipped modules import each shipped module."""
    modules = {_module(path) for path in trees}
    counts: Counter[str] = Counter()
    for path, tree in trees.items():
        counts.update((set(_imported(tree)) & modules) - {_module(path)})
    return counts


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        # A string that stands alone describes the module, class, function or name beside it.
        text = node.value if isinstance(node, ast.Expr) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _annotated(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and node.value is not None


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    parts = parts[1:] if parts[0] == "protos" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@click.command()
@click.argument("other", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--step", is_flag=True, help="Train a model for some steps, and count the files that a step enters.")
@click.option("--calls", is_flag=True, help="Train a model of 10 KB over bulk, and count the functions a step enters.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(other: Path | None, step: bool, calls: bool, as_json: bool) -> None:
    """Count lines, files and constants of this tree; of the checkout OTHER, too."""
    found = {"this tree": asdict(weigh())}
    if other:
        found[str(other)] = asdict(weigh(other))
    if step:
        from benchmarks.step_files import files_of_a_step

        files = files_of_a_step()
        for package in SHIPPED:
            found["this tree"][f"files_of_a_step in {package}"] = sum(file.startswith(package) for file in files)
    if calls:
        from benchmarks.step_files import calls_of_a_step, of_packages

        for package, count in of_packages(calls_of_a_step()).items():
            found["this tree"][f"functions_entered_by_a_step in {package}"] = round(count)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for name, figures in found.items():
        click.echo(name)
        for figure, count in figures.items():
            click.echo(f"  {figure.replace('_', ' '):<40} {count:>8,}")


if __name__ == "__main__":
    main()
