"""Decides what is wrong with the names in a source archive or a wheel. As a program: ``archives.py FILE …``."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

PACKAGES = ("ps_protocol", "ps_server", "ps_worker")

#: What every archive has.
CODE = (
    *(f"{package}/py.typed" for package in PACKAGES),
    "ps_protocol/v1/shard.proto",
    "ps_protocol/v1/shard_pb2.py",
    "ps_protocol/v1/shard_pb2.pyi",
    "ps_server/cli/launcher/main.py",
    "ps_worker/cluster.py",
)

#: What a source archive has besides.
SOURCES = (
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "constraints.txt",
    "docs/architecture.md",
    "docs/decisions/README.md",
    "examples/digits.py",
    "examples/quickstart.ipynb",
    "examples/clicks/models.py",
    "pyproject.toml",
)

_STRAY = frozenset({"tests", "benchmarks", "chaos", "simulation", "build", ".venv", "__pycache__"})


def problems(names: Iterable[str], *, is_wheel: bool) -> Iterator[str]:
    """A sentence for each name that is missing or should not be there; ``names`` without the archive's own folder."""
    found = {name for name in names if not name.endswith("/")}
    code = found if is_wheel else {name.removeprefix("protos/") for name in found}
    yield from (f"{name} is missing" for name in CODE if name not in code)
    if not is_wheel:
        yield from (f"{name} is missing" for name in SOURCES if name not in found)
    for name in sorted(found):
        path = PurePosixPath(name)
        stray = _STRAY.intersection(path.parts) or path.name.startswith("test_")
        top = path.parts[0]
        if stray or (is_wheel and top not in PACKAGES and not top.endswith(".dist-info")):
            yield f"{name} should not be there"


def names_in(archive: Path) -> list[str]:
    """The names in a wheel, or those in a source archive below its one folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.namelist()
    with tarfile.open(archive) as sources:
        return [name.partition("/")[2] for name in sources.getnames() if "/" in name]


def main(archives: Iterable[str]) -> int:
    """Print what is wrong; 1 if anything is."""
    wrong = [
        f"{archive}: {problem}"
        for archive in archives
        for problem in problems(names_in(Path(archive)), is_wheel=archive.endswith(".whl"))
    ]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
