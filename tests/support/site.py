"""The pages of the documentation and the links between them. mkdocs calls the functions ``on_…`` (mkdocs.yml)."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[2]

_MEASURED = sorted((ROOT / "benchmarks").glob("*.md"))

#: Files outside docs/ that are pages of the site, with their names there.
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "benchmarks/README.md": "benchmarks.md",
    **{str(page.relative_to(ROOT)): f"benchmarks/{page.name}" for page in _MEASURED if page.name != "README.md"},
    "benchmarks/latest.png": "latest.png",
    "examples/README.md": "examples.md",
}

#: Packages of ps_worker that need an extra; their ``__all__`` is public, too.
EXTRAS = ("huggingface", "lightning", "ray")

_FENCE = re.compile(r"^( *)(```|~~~).*?^ *\2", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!\\)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ (.+?) *$", re.MULTILINE)

logger = logging.getLogger("mkdocs.hooks.site")


def without_code(text: str) -> str:
    """``text`` without blocks of code."""
    return _FENCE.sub("", text)


def links_of(text: str) -> list[str]:
    """The targets of the links to other files and to headings of this one."""
    return [target for _, target in _LINK.findall(without_code(text)) if not is_address(target)]


def is_address(target: str) -> bool:
    """Whether a link leaves the documentation."""
    return re.match(r"[a-z]+:", target) is not None


def anchors_of(text: str) -> set[str]:
    """The anchors of the headings, as GitHub and the site name them."""
    words = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in _HEADING.findall(without_code(text))]
    return {re.sub(r" ", "-", re.sub(r"[^\w\- ]", "", heading.lower())) for heading in words}


def resolved(source: str, target: str) -> tuple[str, str]:
    """The file that a link on the page ``source`` leads to, below the root, and the anchor there or an empty text."""
    path, _, anchor = target.partition("#")
    if not path:
        return source, anchor
    parts: list[str] = []
    for part in (PurePosixPath(source).parent / path).parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(parts), anchor


def broken_links(source: str, text: str) -> Iterator[str]:
    """The links of the page ``source``, below the root, that lead to no file or no heading, or name another page."""
    named = ((words.strip("`"), target) for words, target in _LINK.findall(without_code(text)))
    yield from (
        words for words, target in named if words.endswith(".md") and PurePosixPath(words).name != _page(target)
    )
    for target in links_of(text):
        path, anchor = resolved(source, target)
        if not (ROOT / path).exists() or (anchor and anchor not in _anchors(path, source, text)):
            yield target


def _page(target: str) -> str:
    return PurePosixPath(target.partition("#")[0]).name


def _anchors(path: str, source: str, text: str) -> set[str]:
    if path == source:
        return anchors_of(text)
    return anchors_of((ROOT / path).read_text()) if path.endswith(".md") else set()


def place_on_site(source: str) -> str | None:
    """The place of a file on the site, None where it is not part of it."""
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    return OUTSIDE.get(source)


def for_the_site(source: str, text: str) -> str:
    """The page ``source`` with links as the site needs them; a link to a file that is not on the site becomes text."""
    folder = PurePosixPath(place_on_site(source) or "").parent

    def link(match: re.Match[str]) -> str:
        words, target = match.groups()
        if is_address(target) or target.startswith("#"):
            return match[0]
        path, anchor = resolved(source, target)
        if path == "docs/decisions":
            path = "docs/decisions/README.md"
        place = place_on_site(path)
        if place is None or not (ROOT / path).is_file():
            return words if (ROOT / path).exists() else match[0]
        up = "../" * len(folder.parts)
        return f"[{words}]({up}{place}{'#' if anchor else ''}{anchor})"

    return _LINK.sub(link, text)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    for source, place in OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page."""
    sources = {place: source for source, place in OUTSIDE.items()}
    name = page.file.src_uri
    return for_the_site(sources.get(name, f"docs/{name}"), markdown)


def on_pre_build(**_: Any) -> None:
    """Warn of public names without a docstring; a strict build fails."""
    import griffe

    package = griffe.load(
        "ps_worker", search_paths=[str(ROOT), str(ROOT / "protos")], resolve_aliases=True, resolve_external=True
    )
    for module in (package, *(package[name] for name in EXTRAS)):
        for name in sorted(module.exports or []):
            for path in _undocumented(module[str(name)]):
                logger.warning("%s has no docstring", path)


def _undocumented(found: Any) -> Iterator[str]:
    thing = found.final_target if found.is_alias else found
    if not thing.docstring and (thing.is_class or thing.is_function or thing.is_module):
        yield thing.path
    if thing.is_class or thing.is_module:
        for name, member in thing.members.items():
            if not name.startswith("_") and not member.is_alias:
                yield from _undocumented(member)
