"""What scripts rely on: the JSON of psctl, its schema in the docs, exit codes, completion."""

import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ps_protocol.client.model_status import TableTotals
from ps_protocol.cluster.view import (
    ClusterStatus,
    ClusterView,
    Divergence,
    JobEvent,
    LogCounts,
    Member,
    MemberStats,
    MemberStatus,
    Role,
    TableCounts,
    UpdateCounts,
)
from ps_protocol.model.spec import Consistency, Mode, StalePolicy
from ps_server.cli.launcher.main import main as ps_run
from ps_server.cli.psctl import output as facts
from ps_server.cli.psctl.main import main as psctl
from ps_server.cli.psctl.status import SCHEMA, schema_fields, status_json
from ps_server.coordinator.main import main as coordinator
from ps_server.shard.main import main as server

DOCS = Path(__file__).parents[3] / "docs" / "psctl.md"

TABLES = (TableTotals("m", "t", 1, 0, 4, 2, 1, 0, 0, 2, 2),)


def full() -> ClusterStatus:
    """A status in which nothing is empty."""
    member = Member(Role.SHARD, 0, 7, "127.0.0.1:1")
    stats = MemberStats(
        metrics={"loss": 0.5},
        standby_lag=3,
        versions={"m": 4},
        wait_seconds={"pull": 1.5},
        streams={"shm": 2},
        log=LogCounts(*range(4)),
        tables=(TableCounts("m", "t", *range(6)),),
        updates=(UpdateCounts("m", 0.5, 1.5, 3.0),),
    )
    view = ClusterView(
        3,
        (member,),
        Consistency(Mode.SSP, 2),
        {"m": 1},
        spare=frozenset({1}),
        journal_mark=b"x",
        released_models={"n": 2},
        wanted_workers=3,
        wanted_shards=2,
    )
    decisions = (JobEvent(4, 1.5, "worker 3 is slow", True),)
    grown = (Divergence(member, "loss", 9.5, 0.5, 1.5, 2.5, 4.0, "/saves/checkpoint-00000001", 12),)
    members = (MemberStatus(member, 0.1, stats, "host", 9),)
    return ClusterStatus(view, members, "http://a:1/metrics", decisions, stale_rules={"m": "accept"}, divergences=grown)


def paths(value: object, path: str = "", mapping: bool = False) -> dict[str, object]:
    """The values of a JSON document by path, as in the schema."""
    if isinstance(value, list):
        return {name: each for item in value for name, each in paths(item, f"{path}[]").items()}
    if isinstance(value, dict):
        found: dict[str, object] = {}
        for name, item in value.items():
            inner = "*" if f"{path}.*" in schema_fields() else name
            found |= paths(item, f"{path}.{inner}".lstrip("."))
        return found
    return {path: value}


def test_the_status_has_the_fields_of_its_schema_and_no_others():
    told = paths(json.loads(status_json(full(), TABLES)))
    assert told.keys() == schema_fields().keys()
    kinds = {bool: "boolean", int: "number", float: "number", str: "string"}
    for path, value in told.items():
        assert schema_fields()[path].split(" or ")[0] == kinds[type(value)], path
    assert told["schema"] == SCHEMA == 1


def test_the_docs_list_every_field_with_its_type():
    section = DOCS.read_text().partition("## The status as JSON")[2].partition("```")[0]
    listed = dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", section, re.MULTILINE))
    assert listed == schema_fields()


def test_the_docs_list_the_values_of_modes_and_policies():
    rows = dict(re.findall(r"^\| `view\.consistency\.(\w+)` \| string \| ([^|]+) \|", DOCS.read_text(), re.MULTILINE))
    assert set(re.findall(r"\w+", rows["mode"])) - {"or"} == {each.value for each in Mode}
    assert set(re.findall(r"\w+", rows["stale_policy"].partition(":")[2])) - {"or"} == {p.value for p in StalePolicy}


def test_a_number_that_json_lacks_is_null():
    assert facts.to_json({"loss": float("nan"), "rate": float("-inf"), "fine": 0.5}) == {
        "loss": None,
        "rate": None,
        "fine": 0.5,
    }


def test_the_docs_list_every_command_and_whether_it_prints_json():
    table = DOCS.read_text().partition("| command | JSON |")[2].partition("##")[0]
    listed = set(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE))
    prints = {name for name, each in psctl.commands.items() if any(p.name == "as_json" for p in each.params)}
    assert listed >= prints
    assert listed <= set(psctl.commands)


@click.command()
@facts.output_option()
def teller(as_json: bool) -> None:
    facts.print_result({"answer": 42}, "it is 42", as_json)


@pytest.mark.parametrize("flags", [("-o", "json"), ("--output", "json"), ("--json",), ("--json", "-o", "text")])
def test_json_has_two_names(flags):
    assert json.loads(CliRunner().invoke(teller, flags).output) == {"answer": 42}


@pytest.mark.parametrize("flags", [(), ("-o", "text")])
def test_text_is_the_default(flags):
    assert CliRunner().invoke(teller, flags).output == "it is 42\n"


def test_an_unknown_form_is_wrong_usage(tmp_path):
    found = CliRunner().invoke(psctl, ["verify", str(tmp_path), "-o", "yaml"])
    assert found.exit_code == 2
    assert "'yaml' is not one of 'text', 'json'" in found.output


@pytest.mark.parametrize(
    ("command", "name", "typed", "offered"),
    [
        (psctl, "psctl", "psctl sta", "status"),
        (psctl, "psctl", "psctl status -o ", "json"),
        (ps_run, "ps-run", "ps-run --mode ", "ssp"),
        (server, "ps-server", "ps-server --log-format ", "json"),
        (coordinator, "ps-coordinator", "ps-coordinator --mo", "--mode"),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shells_complete_commands_options_and_choices(command, name, typed, offered, shell):
    variable = f"_{name.replace('-', '_').upper()}_COMPLETE"
    words = typed.split(" ")
    environment = {variable: f"{shell}_complete", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    found = CliRunner().invoke(command, env=environment, prog_name=name)
    assert offered in re.split(r"[,\n]", found.output)
    assert variable in DOCS.read_text()
