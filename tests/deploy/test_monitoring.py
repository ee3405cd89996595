"""deploy/monitoring: queries name metrics that there are, rules pass their tests, and a job has data for all of it."""

import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import Role
from ps_protocol.launch.ports import free_port
from tests.support import interpreters
from tests.support.metrics_page import CATALOGUES, PAGE, page

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
SCRIPT = Path(__file__).with_name("trained_job.py")

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="prometheus and promtool are not installed: Debian's package prometheus has both",
)

NAMES = {metric.name for catalogue in CATALOGUES for metric in catalogue.own}


JOB = "night"
"""The name of the job that Prometheus scrapes."""


def dashboard_queries() -> list[str]:
    """For one job."""
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    return [target["expr"].replace("$ps_job", JOB) for panel in panels for target in panel.get("targets", ())]


def rules() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((MONITORING / "rules.yml").read_text())["groups"][0]["rules"]
    return found


def test_the_page_of_metrics_is_that_of_the_definitions():
    assert PAGE.read_text() == page(), "run make metrics-page"


def test_names_are_unique_over_the_roles_and_end_with_base_units():
    names = [metric.name for catalogue in CATALOGUES for metric in catalogue.own]
    assert len(names) == len(NAMES)
    assert not [name for name in names if re.search(r"_(ms|millis|micros|minutes|hours|mb|kb|gb)(_|$)", name)]
    assert not [metric for each in CATALOGUES for metric in each.own if not metric.help.endswith((".", "1", "0"))]


def test_every_query_names_metrics_that_there_are():
    for query in [*dashboard_queries(), *(rule["expr"] for rule in rules())]:
        asked = set(re.findall(r"torch_ps_\w+", query))
        base = {re.sub(r"_(bucket|sum|count)$", "", name) if name not in NAMES else name for name in asked}
        assert base <= NAMES, query
        assert asked or query.startswith("up"), query


def test_every_alert_has_a_case_of_its_own():
    cases = yaml.safe_load((MONITORING / "rules_test.yml").read_text())["tests"]
    assert {case["name"] for case in cases} == {rule["alert"] for rule in rules()}
    for case in cases:
        before, after = case["alert_rule_test"]
        assert not before["exp_alerts"]
        assert [alert["exp_labels"]["ps_job"] for alert in after["exp_alerts"]] == ["one"]
        # Another job is well, and not to blame.
        assert any('ps_job="two"' in series["series"] for series in case["input_series"])


def test_every_panel_shows_the_job_that_is_chosen():
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    assert [each["name"] for each in dashboard["templating"]["list"]] == ["datasource", "ps_job"]
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            names = re.findall(r"torch_ps_\w+", target["expr"])
            assert re.findall(r'(torch_ps_\w+)\{ps_job="\$ps_job"', target["expr"]) == names


@needs_prometheus
def test_the_rules_pass_their_tests_and_the_example_is_valid():
    for arguments in (["check", "rules", "rules.yml"], ["check", "config", "prometheus.yml"]):
        subprocess.run(["promtool", *arguments], cwd=MONITORING, check=True, capture_output=True)
    done = subprocess.run(
        ["promtool", "test", "rules", "rules_test.yml"], cwd=MONITORING, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


class Job:
    """Coordinator, two shards, a standby, two workers, forked, and a Prometheus that scrapes them, each a process."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self.processes: dict[str, subprocess.Popen[bytes] | interpreters.Popen] = {}
        self.prometheus = ""

    def start(self, name: str, *command: str, **environment: str) -> None:
        child: subprocess.Popen[bytes] | interpreters.Popen
        with (self.folder / f"{name}.log").open("wb") as log:
            if command[0] == sys.executable:
                child = interpreters.Popen(command, stdin=None, stdout=log, stderr=log, env=environment)
            else:
                child = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        self.processes[name] = child
        self._stack.callback(_end, child)

    def wait(self, what: str, holds: Callable[[], Any]) -> Any:
        """The first true value of ``holds``; fails where a process that should run has ended, or after minutes."""
        deadline = time.monotonic() + 150
        while not (found := holds()):
            ended = [name for name, child in self.processes.items() if child.poll() is not None]
            logs = {name: (self.folder / f"{name}.log").read_text()[-2000:] for name in ended}
            assert not ended, f"while waiting for {what}: {logs}"
            assert time.monotonic() < deadline, f"waited too long for {what}"
            time.sleep(0.2)
        return found

    def ask(self, path: str, **parameters: str) -> Any:
        """A call of Prometheus' API; None while it is not there."""
        try:
            with urllib.request.urlopen(
                f"{self.prometheus}{path}?{urllib.parse.urlencode(parameters)}", timeout=60
            ) as got:
                return json.load(got)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return None
            raise AssertionError(error.read().decode()) from error
        except OSError:
            return None

    def values(self, query: str) -> list[float]:
        """The values of an instant query that are numbers."""
        found = self.ask("/api/v1/query", query=query)
        return [v for each in (found["result"] if found else ()) if not math.isnan(v := float(each["value"][1]))]


def _end(child: subprocess.Popen[bytes] | interpreters.Popen) -> None:
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(30)
        except (subprocess.TimeoutExpired, AssertionError):
            child.kill()
            child.wait()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("monitoring")
    with ExitStack() as stack:
        running = Job(folder, stack)
        ready = folder / "ready"
        module = (sys.executable, "-m")
        running.start(
            "coordinator",
            *(*module, "ps_server.coordinator.main", "--port", "0", "--ready-file", str(ready)),
            *("--shards", "2", "--workers", "2", "--mode", "sync", "--lease-seconds", "10", "--job", JOB),
            *("--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-seconds", "2"),
        )
        running.wait("the coordinator", ready.exists)
        address = ready.read_text().strip()

        def start_shard(name: str, number: int) -> None:
            running.start(
                name,
                *(*module, "ps_server.shard.main", "--shard", str(number), "--coordinator", address),
                *("--data-dir", str(folder / f"data-of-{name}"), "--snapshot-seconds", "2", "--standby"),
                *("--checkpoint-dir", str(folder / "checkpoints")),
            )

        for number in range(2):
            start_shard(f"shard-{number}", number)
            running.start(
                f"worker-{number}",
                *(sys.executable, str(SCRIPT)),
                PS_COORDINATOR=address,
                PS_RANK=str(number),
                PS_METRICS_PORT="0",
                TEST_END_FILE=str(folder / "end"),
            )
        with CoordinatorClient(address) as client:
            running.wait("shard 0", lambda: 0 in client.get_status().view.live(Role.SHARD))
            start_shard("standby", 0)
            targets = client.get_status().metrics_url.removesuffix("metrics") + "targets"
        config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(MONITORING / "rules.yml")]
        config["scrape_configs"][0]["http_sd_configs"] = [{"url": targets, "refresh_interval": "1s"}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        port = free_port()
        running.prometheus = f"http://127.0.0.1:{port}"
        running.start(
            "prometheus",
            *("prometheus", "--config.file", str(folder / "prometheus.yml")),
            *("--storage.tsdb.path", str(folder / "tsdb"), "--web.listen-address", f"127.0.0.1:{port}"),
        )
        running.wait("Prometheus", lambda: running.ask("/api/v1/targets"))
        yield running


@needs_prometheus
def test_every_process_of_the_job_is_found_and_scraped(job):

    def six(query: str) -> list[dict[str, Any]]:
        """All at once: a target that answers late is down until it is asked again."""
        found = job.ask("/api/v1/query", query=query)
        return found["result"] if found and len(found["result"]) == 6 else []

    found = job.wait("six targets", lambda: six("up == 1"))
    assert {each["metric"]["ps_job"] for each in found} == {JOB}
    # Of every sample; none was renamed for the label of its target.
    count = f'count by (instance) (torch_ps_build_info{{ps_job="{JOB}",exported_ps_job=""}})'
    job.wait("a sample of each", lambda: six(count))
    components = sorted(each["metric"]["component"] for each in found)
    assert components == ["coordinator", "shard", "shard", "standby", "worker", "worker"]
    for each in found:
        with urllib.request.urlopen(f"http://{each['metric']['instance']}/metrics", timeout=60) as got:
            text = got.read()
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@needs_prometheus
def test_every_query_of_the_dashboard_returns_data(job):
    for query in dashboard_queries():
        job.wait(f"data for {query}", lambda query=query: job.values(query.replace("$__rate_interval", "20s")))


@needs_prometheus
def test_a_killed_shard_raises_an_alert(job):
    def firing() -> set[str]:
        found = job.ask("/api/v1/alerts")
        return (
            {each["labels"]["alertname"] for each in found["alerts"] if each["state"] == "firing"} if found else set()
        )

    job.wait("two shards", lambda: job.values('torch_ps_members{role="shard", state="live"} == 2'))
    job.wait("no alert", lambda: "TorchPsShardMissing" not in firing())
    killed = job.processes.pop("shard-1")
    # Workers may end now: its port may become that of a server of another test.
    for name in [name for name in job.processes if name.startswith("worker")]:
        del job.processes[name]
    killed.kill()
    killed.wait()
    job.wait("the alert", lambda: "TorchPsShardMissing" in firing())
