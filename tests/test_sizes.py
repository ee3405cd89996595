"""A file is read at one sitting, a folder seen at one glance: no shipped file and no shipped folder grows beyond it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.test_names import ROOT, SHIPPED

MOST_LINES = 350
MOST_MODULES = 18


def too_long(texts: dict[Path, str]) -> dict[str, int]:
    """Files with more than MOST_LINES lines, and how many they have."""
    lines = {str(file): len(text.splitlines()) for file, text in texts.items()}
    return {file: count for file, count in lines.items() if count > MOST_LINES}


def too_full(files: list[Path]) -> dict[str, int]:
    """Folders with more than MOST_MODULES modules beside their ``__init__``, and how many they have."""
    modules = Counter(str(file.parent) for file in files if file.name != "__init__.py")
    return {folder: count for folder, count in modules.items() if count > MOST_MODULES}


def test_no_shipped_file_is_too_long():
    assert too_long({file.relative_to(ROOT): file.read_text() for file in SHIPPED}) == {}


def test_no_shipped_folder_has_too_many_modules():
    assert too_full([file.relative_to(ROOT) for file in SHIPPED]) == {}


def test_what_is_too_long_and_too_full_is_found():
    line = "x = 1\n"
    assert too_long({Path("a.py"): line * MOST_LINES, Path("b.py"): line * (MOST_LINES + 1)}) == {"b.py": 351}
    files = [Path("a", f"m{number}.py") for number in range(MOST_MODULES)] + [Path("a", "__init__.py")]
    assert too_full(files) == {}
    assert too_full([*files, Path("a", "one_more.py")]) == {"a": 19}
