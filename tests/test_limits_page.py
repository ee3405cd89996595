"""docs/deploy.md has every limit, with the option that sets it and its default."""

import re
from pathlib import Path

import pytest

from ps_server.coordinator import main as coordinator_program
from ps_server.limits import LIMITS
from ps_server.shard import main as shard_program

PAGE = Path(__file__).parents[1] / "docs" / "deploy.md"
BEGIN, END = "<!-- limits -->\n", "<!-- /limits -->\n"


def rows() -> dict[str, tuple[str, str, str]]:
    """By the limit's name in the metric: its option, its default, and what the client sees."""
    text = PAGE.read_text()
    table = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {name.strip("`"): (option, default, seen) for name, _, option, default, seen in cells}


def test_the_page_has_a_row_of_every_limit():
    assert sorted(rows()) == sorted(LIMITS)
    assert all(seen for _, _, seen in rows().values())


@pytest.mark.parametrize("limit", LIMITS)
def test_the_option_on_the_page_exists_and_has_that_default(limit):
    option, default, _ = rows()[limit]
    flag = option.strip("`")
    found = [
        parameter
        for program in (coordinator_program.main, shard_program.main)
        for parameter in program.params
        if flag in parameter.opts
    ]
    assert found, f"no program has {flag}"
    if re.fullmatch(r"[\d,]+", default):
        assert found[0].default == int(default.replace(",", ""))
    elif match := re.fullmatch(r"([\d.]+) s", default):
        assert found[0].default == float(match[1])
