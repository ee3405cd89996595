"""A reader's way through docs/recommenders.md: its programs and commands run as they are printed, in their order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
from click.testing import CliRunner
from safetensors.numpy import load_file

from ps_protocol.launch.ports import free_port
from ps_server.cli.psctl.main import main as psctl
from ps_worker.feed import TableCopy
from tests.cli import forked
from tests.support.interpreters import Interpreter, run

PAGE = (Path(__file__).parents[2] / "docs" / "recommenders.md").read_text()
PROGRAMS = {code.split()[1].rstrip(":"): code for code in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)}
#: Runs the script of its argument as a worker. The servers stay for an evaluator, and this one waits for who serves.
BESIDE = """
import os, pathlib, runpy, sys, time
if os.environ.get("PS_ROLE") == "evaluator":
    while not pathlib.Path("serve.py.ended").exists():
        time.sleep(0.05)
else:
    runpy.run_path(sys.argv.pop(), run_name="__main__")
"""
COMMANDS = [line for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S) for line in block.splitlines()]


def command(begins: str) -> list[str]:
    """The words of the one command on the page that begins so, after these."""
    [line] = [line for line in COMMANDS if line.startswith(begins)]
    return shlex.split(line.removeprefix(begins))


def script(folder: Path, *arguments: str) -> tuple[str, ...]:
    """What has an interpreter run a program of the page in ``folder``; at its end there is a file of its name."""
    code = f"import os, runpy, sys; os.chdir({str(folder)!r}); sys.path.insert(0, {str(folder)!r}); "
    code += (
        "sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__'); open(sys.argv[0] + '.ended', 'w').close()"
    )
    return "-c", code, *arguments


def table(folder: Path, name: str) -> dict[int, list[float]]:
    found = load_file(folder / "exported" / "tables" / f"{name}.safetensors")
    return dict(zip(found["ids"].tolist(), found["rows"].tolist(), strict=True))


def test_a_reader_trains_serves_and_exports_what_the_page_prints(tmp_path: Path) -> None:
    for name, code in PROGRAMS.items():
        (tmp_path / name).write_text(code)
    assert list(PROGRAMS) == ["clicks.py", "train.py", "serve.py", "read.py"]
    assert command("python clicks.py") == []
    assert run(*script(tmp_path, "clicks.py")).returncode == 0
    port = str(free_port())
    [address] = command("python serve.py ")
    served = Interpreter(*script(tmp_path, "serve.py", address.replace("7000", port)))
    try:
        job = [port if word == "7000" else word for word in command("ps-run ")]
        (tmp_path / "beside.py").write_text(BESIDE)
        flags = ("--no-progress", "--seed", "1", "--evaluators", "1")
        done = forked.run(tmp_path, *flags, *job[:-1], "beside.py", job[-1])
        assert done.returncode == 0, done.stdout + done.stderr
        assert served.wait() == 0
        told = served.stdout.read()
    finally:
        served.close()
    reached = [float(auc) for auc in re.findall(r"day \d, ranked with the days before: AUC ([\d.]+)", done.stdout)]
    assert len(reached) == 3
    assert reached[-1] > 0.65
    # An even user clicks on even items.
    best = re.findall(r"user 350 gets \[(\d+), (\d+), (\d+)\]", told)
    assert best, told
    assert [int(item) % 2 for item in best[-1]] == [0, 0, 0]

    [checkpoint] = (tmp_path / "checkpoints").glob("checkpoint-*")
    for target in ("exported", "parquet"):
        words = command(f"psctl export checkpoints/CHECKPOINT {target}")
        exported = CliRunner().invoke(psctl, ["export", str(checkpoint), str(tmp_path / target), *words])
        assert exported.exit_code == 0, exported.output
    for name in ("users", "items"):
        copy, rows = TableCopy.load(tmp_path / f"{name}.npz"), table(tmp_path, name)
        # What expired after the last push may be missing in one of the two.
        ids = np.array(sorted(set(copy.ids.tolist()) & rows.keys()))
        assert len(ids) > 0.9 * max(len(copy), len(rows)) > 0
        np.testing.assert_array_equal(copy.rows(ids), np.array([rows[id] for id in ids.tolist()], np.float32))
    # Users of the first day are gone.
    assert min(table(tmp_path, "users")) >= 100
    read = run(*script(tmp_path, "read.py"))
    assert read.returncode == 0, read.stderr
    even, odd, *_ = map(float, re.findall(r"0\.\d+", read.stdout))
    assert even > odd
    assert np.load(tmp_path / "users-exported.npz")["rows"].shape == (len(table(tmp_path, "users")), 16)
