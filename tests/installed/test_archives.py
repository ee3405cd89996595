"""What is released has everything it should, and the metadata says what the checks of a release do."""

from __future__ import annotations

import re
import tomllib
import zipfile
from pathlib import Path

from tests.installed.archives import CODE, SOURCES, main, problems

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_a_complete_archive_has_no_problem():
    assert list(problems(CODE, is_wheel=True)) == []
    assert list(problems([*CODE, *SOURCES, "docs/"], is_wheel=False)) == []
    assert list(problems(["torch_ps-0.1.0.dist-info/METADATA", *CODE], is_wheel=True)) == []


def test_what_is_missing_is_named():
    assert list(problems(CODE[1:], is_wheel=True)) == [f"{CODE[0]} is missing"]
    assert list(problems([*CODE, *SOURCES[1:]], is_wheel=False)) == [f"{SOURCES[0]} is missing"]


def test_tests_and_leavings_of_a_build_are_named():
    stray = ["build/lib/x.py", "ps_worker/__pycache__/x.pyc", "ps_worker/test_it.py", "tests/test_guarantees.py"]
    assert list(problems([*CODE, *SOURCES, *stray], is_wheel=False)) == [f"{n} should not be there" for n in stray]


def test_a_wheel_installs_the_three_packages_and_nothing_else():
    assert list(problems([*CODE, "examples/digits.py"], is_wheel=True)) == ["examples/digits.py should not be there"]


def test_the_program_fails_for_a_wheel_with_a_problem(tmp_path, capsys):
    wheel = tmp_path / "torch_ps-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for name in CODE[1:]:
            file.writestr(name, "")
    assert main([str(wheel)]) == 1
    assert capsys.readouterr().out == f"{wheel}: {CODE[0]} is missing\n"


def test_the_names_that_a_source_archive_must_have_exist():
    for name in SOURCES:
        assert (ROOT / name).is_file(), name
    for name in CODE:
        assert (ROOT / name).is_file() or (ROOT / "protos" / name).is_file(), name


def test_every_python_that_the_metadata_promises_is_tried():
    promised = {found[1] for each in PROJECT["classifiers"] if (found := re.search(r"Python :: (3\.\d+)$", each))}
    script = (ROOT / "tests" / "installed.sh").read_text()
    named = re.search(r"^PROMISED=\((.*)\)$", script, re.MULTILINE)
    assert named is not None
    assert set(named[1].split()) == promised
    assert PROJECT["requires-python"] == ">=" + min(promised)
    assert PROJECT["authors"]
