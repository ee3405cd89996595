"""Records of the log as text and JSON: nothing from outside breaks a line or speaks to a terminal."""

import io
import json
import logging
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol import logs
from ps_protocol.errors import ConfigError, StateLost
from ps_protocol.logs import (
    EVENTS,
    FACTS,
    EventLogger,
    JsonFormatter,
    LineFormatter,
    LogFormat,
    configure_logging,
    describe_process,
    time_text,
)
from ps_worker.session.logs import install

EVIL = "a\nERROR forged\x1b[2J\r\u202eevil\u2066\u2028\x07\ud800\x00"


@pytest.fixture(autouse=True)
def unknown_process(monkeypatch):
    """A process that has said nothing of itself, and changes to the log that end with the test."""
    monkeypatch.setattr(logs, "_process", dict.fromkeys(FACTS))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    loggers = [logging.getLogger(name) for name in ("ps_worker", "ps_protocol")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        # Clears what loggers remember of their levels, too.
        logger.setLevel(level)


def record(message, *values, level=logging.INFO, trace=None, **more):
    made = logging.LogRecord("ps_server.shard", level, "", 0, message, values, trace)
    made.__dict__.update(more)
    return made


def as_json(made):
    line = JsonFormatter().format(made)
    assert "\n" not in line
    assert all(each.isprintable() for each in line)
    return json.loads(line)


def test_a_json_record_says_when_who_and_what():
    describe_process(role="shard", shard=2, job="nightly")
    describe_process(incarnation=17)
    said = as_json(record("model '%s': %s uses %s", "m", "worker 0", "shm", event="transport"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", said.pop("time"))
    assert said == {
        "level": "info",
        "role": "shard",
        "shard": 2,
        "worker": None,
        "incarnation": 17,
        "job": "nightly",
        "event": "transport",
        "message": "model 'm': worker 0 uses shm",
        "logger": "ps_server.shard",
    }


def test_a_field_that_records_do_not_have_is_refused():
    with pytest.raises(TypeError, match="colour"):
        describe_process(colour="red")


def test_the_time_is_utc_with_milliseconds():
    assert time_text(0) == "1970-01-01T00:00:00.000Z"
    assert time_text(1_795_359_845.6789) == "2026-11-22T15:04:05.678Z"


@pytest.mark.parametrize(
    ("made", "event"),
    [
        (record("%s", "worker 0 left", event="cluster.change"), "cluster.change"),
        (record("%s", StateLost("shard 0 has lost it")), "StateLost"),
        (record("%s", OSError("no disk")), "error"),
        (record("%s", "worker 0 left"), "other"),
        (record("theirs", event="not.ours"), "other"),
        (record("a detail", level=logging.DEBUG), "debug"),
        (record("a message of another library"), "other"),
    ],
)
def test_the_event_is_the_same_for_all_messages_of_a_kind(made, event):
    assert as_json(made)["event"] == event


def test_a_logger_writes_the_event_that_a_call_names():
    stream = io.StringIO()
    configure_logging("debug", LogFormat.JSON, ("ps_protocol",), stream)
    logger = EventLogger("ps_protocol.somewhere")
    logger.debug("step %d", 1)
    logger.info("move", "moved %d slices", 2)
    logger.warning("waiting", "100% text, no values")
    logger.log(logging.WARNING, "psctl.note", "%s", "no")
    logger.failure(StateLost("lost"))
    try:
        raise ValueError("bad")
    except ValueError as error:
        logger.exception("request.failed", "failed")
        logger.error("model.stopped", "stopped", exc_info=error)
    said = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(each["level"], each["event"], each["message"]) for each in said] == [
        ("debug", "debug", "step 1"),
        ("info", "move", "moved 2 slices"),
        ("warning", "waiting", "100% text, no values"),
        ("warning", "psctl.note", "no"),
        ("error", "StateLost", "lost"),
        ("error", "request.failed", "failed"),
        ("error", "model.stopped", "stopped"),
    ]
    assert [each.get("exception", [""])[-1] for each in said[-3:]] == ["", "ValueError: bad", "ValueError: bad"]


@given(st.text(st.characters()))
def test_any_text_stays_one_line_of_printed_characters(text):
    said = as_json(record("worker 0 left: %s", text, event=text))
    assert said["message"].isprintable()
    assert said["event"] in EVENTS
    line = LineFormatter(logs.TEXT_FORMAT).format(record("worker 0 left: %s", text))
    assert line.isprintable()


@pytest.mark.parametrize("form", LogFormat)
def test_a_traceback_has_no_character_that_is_not_printed(form):
    try:
        raise ValueError(EVIL)
    except ValueError:
        trace = sys.exc_info()
    formatter = JsonFormatter() if form is LogFormat.JSON else LineFormatter(logs.TEXT_FORMAT)
    text = formatter.format(record("failed: %s", EVIL, trace=trace))
    if form is LogFormat.JSON:
        lines = json.loads(text)["exception"]
        assert lines[-1].startswith("  ValueError: a") or any("ValueError: a" in line for line in lines)
    else:
        first, *lines = text.split("\n")
        assert first.isprintable()
        assert all(line.startswith("  ") for line in lines)
    assert all(line.isprintable() for line in lines)


def test_a_training_script_gets_json_of_torch_ps_alone():
    stream = io.StringIO()
    configure_logging("warning", LogFormat.JSON, ("ps_worker",), stream)
    logging.getLogger("ps_worker").warning("waiting for %s", "shard 0")
    logging.getLogger("ps_worker").info("not so low")
    logging.getLogger("theirs").warning("not ours")
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["message"] == "waiting for shard 0"


def test_the_environment_of_a_worker_chooses_its_log(capsys):
    install({})
    assert logging.getLogger("ps_worker").propagate
    install({"PS_LOG_FORMAT": "JSON", "PS_LOG_LEVEL": "info", "PS_JOB": "nightly"})
    logging.getLogger("ps_worker").info("hello")
    said = json.loads(capsys.readouterr().err)
    assert (said["message"], said["job"], said["level"]) == ("hello", "nightly", "info")
    install({"PS_LOG_LEVEL": "error"})
    logging.getLogger("ps_worker").warning("not so low")
    logging.getLogger("ps_worker").error("as text")
    assert capsys.readouterr().err.endswith("ERROR ps_worker as text\n")


@pytest.mark.parametrize(("name", "value"), [("PS_LOG_FORMAT", "xml"), ("PS_LOG_LEVEL", "loud")])
def test_a_log_that_is_not_known_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} is not one of"):
        install({name: value})


def test_an_exception_that_ends_the_process_is_a_record():
    code = (
        "from ps_protocol.logs import *\nconfigure_logging('info', LogFormat.JSON)\n"
        "describe_process(role='coordinator')\nraise ValueError('a\\nb')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    said = json.loads(line)
    assert (said["event"], said["level"], said["role"]) == ("uncaught", "critical", "coordinator")
    assert said["message"] == "ValueError: a\\nb"


@pytest.mark.parametrize("module", ["ps_server.coordinator.main", "ps_server.shard.main"])
def test_a_program_that_cannot_start_says_so_in_json(module):
    command = [sys.executable, "-m", module, "--log-format", "json", "--data-dir", "/proc/none"]
    if module.startswith("ps_server.shard"):
        command = [sys.executable, "-m", module, "--log-format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    said = json.loads(line)
    assert (said["level"], said["role"]) == ("error", module.split(".")[1])
    assert done.returncode in (1, 2)
