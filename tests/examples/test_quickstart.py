"""The notebook's cells run in order, as they are saved: without their outputs, and in ten lines of training."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import site
from tests.worker.jobs import running_job

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
CELLS = [SimpleNamespace(**cell) for cell in json.loads(NOTEBOOK.read_text())["cells"]]
CODE = ["".join(cell.source) for cell in CELLS if cell.cell_type == "code"]


def test_its_cells_train_in_a_job(monkeypatch, capsys):
    names: dict[str, object] = {}
    with running_job(1) as job:
        monkeypatch.setenv("PS_COORDINATOR", job.address)
        for cell in CODE:
            exec(cell, names)
    assert names["accuracy"] > 0.9
    assert "test accuracy 0.9" in capsys.readouterr().out


@pytest.mark.long
def test_its_cells_train_with_servers_of_their_own(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PS_")}
    command = [sys.executable, "-c", "\n".join(CODE)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "a cluster of its own" in done.stderr
    assert "test accuracy 0.9" in done.stdout


def test_it_trains_in_ten_lines():
    (loop,) = [cell for cell in CODE if "connect()" in cell]
    assert len(loop.splitlines()) == 10


def test_it_is_saved_without_outputs_and_its_links_lead_somewhere():
    assert [cell.outputs for cell in CELLS if cell.cell_type == "code"] == [[]] * len(CODE)
    words = "\n".join("".join(cell.source) for cell in CELLS if cell.cell_type == "markdown")
    assert list(site.broken_links("examples/quickstart.ipynb", words)) == []
