"""ps-run --page: the page of the job is served, and its address printed; that of the metrics in any case."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ps_protocol.model.spec import Consistency
from ps_server.cli.launcher.events import ProcessName, ProcessRole
from ps_server.cli.launcher.programs import Programs, Script

ROOT = Path(__file__).parents[2]

LOOKS = """
import json, os, re, time, urllib.request
import ps_worker
from ps_protocol.client.coordinator import CoordinatorClient
def fetched(url):
    with urllib.request.urlopen(url) as answer:
        return answer.read().decode()
with ps_worker.connect(), CoordinatorClient(os.environ["PS_COORDINATOR"]) as client:
    url, metrics = client.get_history().configuration["page"], client.get_status().metrics_url
    print("the worker sees", url, "<html" in fetched(url))
    print("the worker scrapes", metrics, "# HELP" in fetched(metrics))
    deadline = time.monotonic() + 90
    while len(targets := json.loads(fetched(metrics.removesuffix("metrics") + "targets"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for target in targets:
        lines = [line for line in fetched(f"http://{target['targets'][0]}/metrics").splitlines() if line[0] != "#"]
        jobs = {tuple(re.findall('ps_job="([^"]*)"', line)) for line in lines}
        print("seen", target["labels"]["component"], target["labels"]["ps_job"], *jobs)
"""

#: ps-run that waits for the addresses which it prints, however busy the machine is.
PATIENT = """
from ps_protocol import times
from ps_server.cli.launcher.main import main
times.BRIEF_CALL_SECONDS = 60.0
main()
"""


def test_it_prints_the_addresses_of_the_page_and_of_metrics_and_every_sample_has_the_name_of_the_job(
    tmp_path: Path,
) -> None:
    script = tmp_path / "look.py"
    script.write_text(LOOKS)
    flags = ("--page", "--job", "night-7", "--no-progress")
    command = [sys.executable, "-c", PATIENT, *flags, str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = re.search(r"page at (\S+)", done.stderr)
    assert printed, done.stderr
    assert f"the worker sees {printed[1]} True" in done.stdout
    (metrics,) = re.findall(r"metrics at (\S+); \S+/targets lists every process", done.stderr)
    assert f"the worker scrapes {metrics} True" in done.stdout
    found = sorted(re.findall(r"seen (\w+) (\S+) (.*)", done.stdout))
    assert found == [(component, "night-7", "('night-7',)") for component in ("coordinator", "shard", "worker")]


@pytest.mark.parametrize(("port", "flags"), [(None, []), (0, ["--page-port", "0"]), (7080, ["--page-port", "7080"])])
def test_a_coordinator_that_is_started_again_gets_the_same_port(port: int | None, flags: list[str]) -> None:
    programs = replace(Programs(Script(("python", "x.py")), Consistency(), 1, 1, 1), page_port=port)
    command = programs.command(ProcessName(ProcessRole.COORDINATOR), "127.0.0.1:7000")
    at = command.index("--page-port") if flags else 0
    assert command[at : at + len(flags)] == flags
    assert ("--page-port" in command) == bool(flags)
