"""psctl --log-format json: errors and progress are records of the log, one JSON object per line. Below 1 s of CPU."""

import json
import logging
import sys

import pytest
from click.testing import CliRunner

from ps_protocol import logs
from ps_protocol.logs import EVENTS
from ps_server.cli.psctl import main, output
from ps_server.coordinator.settings import ClusterSettings
from tests.support.coordinators import running_coordinator


@pytest.fixture(autouse=True)
def own_log(monkeypatch):
    """Changes to the log of this process end with the test."""
    monkeypatch.setattr(logs, "_process", dict.fromkeys(logs.FACTS))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    root = logging.getLogger()
    before = root.handlers[:], root.level, logging.getLogger(output.__name__).level
    yield
    root.handlers = before[0]
    root.setLevel(before[1])
    logging.getLogger(output.__name__).setLevel(before[2])


def psctl(*arguments: str, **environment: str | None):
    unset = dict.fromkeys(("PS_COORDINATOR", "PS_LOG_FORMAT", "PS_LOG_LEVEL"))
    return CliRunner().invoke(main.main, arguments, env={**unset, **environment})


def test_why_the_answer_is_no_is_a_record():
    with running_coordinator(ClusterSettings(expected_workers=2, lease_seconds=600)) as coordinator:
        asked = ("--coordinator", coordinator.address, "status", "--check", "-o", "json")
        done = psctl("--log-format", "json", *asked, PS_JOB="nightly")
        assert done.exit_code == 3
        json.loads(done.stdout)
        (line,) = done.stderr.splitlines()
        said = json.loads(line)
        assert said["message"].startswith("not healthy: shard 0 is missing")
        assert (said["event"], said["level"], said["role"], said["job"]) == (
            "psctl.note",
            "warning",
            "psctl",
            "nightly",
        )
        assert said["event"] in EVENTS


def test_an_error_is_a_record_with_its_class_as_the_event():
    done = psctl("status", PS_COORDINATOR="127.0.0.1:1", PS_LOG_FORMAT="json")
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    said = json.loads(line)
    assert (said["event"], said["level"], said["role"]) == ("Unavailable", "error", "psctl")


def test_without_the_options_people_read_lines():
    done = psctl("status", PS_COORDINATOR="127.0.0.1:1")
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: ")


def test_the_level_is_that_of_other_records():
    psctl("--log-level", "debug", "status", PS_COORDINATOR="127.0.0.1:1")
    assert logging.getLogger().level == logging.DEBUG
