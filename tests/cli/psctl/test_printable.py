"""Names from outside that psctl prints move no cursor of a terminal."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ps_server.cli.options.checkpoint import CheckpointConfig
from ps_server.cli.psctl import main
from ps_server.cli.psctl.output import echo
from tests.worker.jobs import running_job

PSCTL = Path(main.__file__).parent
EVIL = "net\x1b[2J\x1b]0;owned\x07\u202e"


def test_the_names_of_models_are_printed_escaped_by_lr_and_verify(tmp_path):
    with running_job(shards=1, workers=1, checkpoints=CheckpointConfig(tmp_path / "kept")) as job:
        model = torch.nn.Linear(3, 2)
        optimizer = job.cluster().optimizer(torch.optim.SGD, model, lr=0.5, name=EVIL)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        folder, _, _ = job.client.checkpoint()
        rates = CliRunner().invoke(main.main, ["lr", "--coordinator", job.address])
        missing = CliRunner().invoke(main.main, ["lr", "--model", EVIL + "2", "--coordinator", job.address])
        verified = CliRunner().invoke(main.main, ["verify", str(folder)])
        shown = CliRunner().invoke(main.main, ["status", "--coordinator", job.address])
    for told in (rates, verified, shown):
        assert told.exit_code == 0, told.output
    for told in (rates, missing, verified, shown):
        assert r"net\x1b[2J" in told.output
        assert not any(each in told.output for each in "\x1b\x07\u202e")


def test_what_is_said_keeps_its_lines(capsys):
    echo("one\ntwo\r\x1b[1m")
    assert capsys.readouterr().out == "one\ntwo\\r\\x1b[1m\n"


@pytest.mark.parametrize("path", sorted(PSCTL.rglob("*.py")), ids=lambda path: path.relative_to(PSCTL).as_posix())
def test_every_command_prints_by_the_one_function(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    printing = [call.lineno for call in calls if ast.unparse(call.func) in ("click.echo", "print", "click.secho")]
    assert printing == [] or path.name == "output.py"
