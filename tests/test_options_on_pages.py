"""An option that a page names is one of a program, or of another one that is listed here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ps_server.cli.launcher import main as launcher
from ps_server.cli.psctl import main as psctl
from ps_server.coordinator import main as coordinator
from ps_server.shard import main as shard

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

#: Of programs that are not ours, of examples and benchmarks, and of every program of click.
OTHERS = {
    *("--cpus-per-task", "--launcher", "--logdir", "--max-restarts", "--nproc-per-node", "--signal"),
    *("--help", "--members", "--ray", "--repeats", "--seconds", "--swarms", "--whole"),
}


def options_of(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for each in getattr(command, "commands", {}).values():
        yield from options_of(each)


COMMANDS = [*(module.main for module in (launcher, psctl, coordinator, shard)), *launcher.OTHER_COMMANDS.values()]
OPTIONS = {each for command in COMMANDS for each in options_of(command)} | OTHERS


def unknown(text: str) -> list[str]:
    """Options that are named beside a program, or alone in backticks, and that none has."""
    lines = [line for line in text.splitlines() if re.search(r"ps-run|ps-server|ps-coordinator|psctl|`--", line)]
    named = [found for line in lines for found in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z](?!…|-?[\w…])", line)]
    return [each for each in named if each not in OPTIONS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_on_a_page_exists(page):
    assert unknown(page.read_text()) == []


def test_options_that_no_program_has_are_found():
    assert unknown("`ps-run --shards 2 --nothing`, `--partition…`\ndocker --never") == ["--nothing"]
