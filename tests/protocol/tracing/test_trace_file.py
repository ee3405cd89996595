import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ps_protocol.errors import ConfigError
from ps_protocol.tracing.context import parse_traceparent
from ps_protocol.tracing.settings import LIMIT_MB, limit_bytes, make_tracer
from ps_protocol.tracing.trace_file import FileTracer
from tests.support.trace_events import check, parts_of, process_names, read, spans

ROOMY = 1 << 20

Make = Callable[[str, int], FileTracer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes tracers that write to one folder, and closes them."""
    with ExitStack() as stack:

        def make(process: str, limit: int) -> FileTracer:
            tracer = FileTracer(tmp_path / "traces", process, limit)
            stack.callback(tracer.close)
            return tracer

        yield make


def step(tracer: FileTracer, begin: int, end: int, track: str = "model a") -> str:
    span = tracer.begin("step", track, begin, {"rank": 3})
    span.part("send", begin + 1, begin + 10, {"shard": 0}, sends=f"{span.key}.0")
    span.part("wait", begin + 10, end, receives=f"{span.key}.0.answer")
    span.end(end, {"outcome": "applied"})
    return span.traceparent


def test_a_closed_file_is_an_array_of_events_with_parts_inside_their_span(make: Make) -> None:
    tracer = make("worker 3", ROOMY)
    told = step(tracer, 1_000, 2_000)
    tracer.close()
    tracer.close()
    events = read(tracer.path)
    check(events)
    assert process_names(events) == {os.getpid(): "worker 3"}
    (whole,) = spans(events, "step")
    context = parse_traceparent(told)
    assert context
    assert whole["args"] == {
        "rank": 3,
        "outcome": "applied",
        "trace_id": f"{context.trace_id:032x}",
        "span_id": context.key,
        "parent_id": "",
    }
    assert (whole["ts"], whole["dur"]) == (1.0, 1.0)
    assert [each["name"] for each in parts_of(events, whole)] == ["send", "wait"]
    assert {event["ph"]: event["id"] for event in events if event["ph"] in "sf"} == {
        "s": f"{context.key}.0",
        "f": f"{context.key}.0.answer",
    }
    assert tracer.path.stat().st_mode & 0o777 == 0o600


def test_a_span_caused_by_another_process_has_its_trace_and_names_it(make: Make) -> None:
    worker, shard = make("worker 0", ROOMY), make("shard 0", ROOMY)
    cause = worker.begin("step", "model a", 0, {})
    effect = shard.begin("push", "worker 0", 5, {}, cause.traceparent)
    stranger = shard.begin("push", "worker 1", 5, {}, "no context")
    assert effect.context.trace_id == cause.context.trace_id
    assert (effect.parent, stranger.parent) == (cause.key, "")
    assert len({cause.key, effect.key, stranger.key}) == 3
    assert stranger.context.trace_id != cause.context.trace_id


def test_spans_of_a_track_that_overlap_get_lines_of_their_own(make: Make) -> None:
    tracer = make("shard 0", ROOMY)
    for begin, end in ((0, 100), (50, 150), (100, 200), (150, 160)):
        step(tracer, begin, end, "worker 0")
    tracer.close()
    events = read(tracer.path)
    check(events)
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["worker 0", "worker 0 (2)"]


def test_names_from_outside_are_escaped(make: Make) -> None:
    tracer = make("worker 0", ROOMY)
    name = 'a"}],\n\x1b[2J\u202e\U0001f600\udc80\\'
    tracer.begin("step", name, 0, {"model": name}).end(10)
    tracer.close()
    raw = tracer.path.read_bytes()
    assert raw.isascii()
    assert b"\x1b" not in raw
    check(read(tracer.path))
    (whole,) = spans(read(tracer.path))
    assert whole["args"]["model"].isprintable()


def test_what_a_killed_process_wrote_is_readable(make: Make) -> None:
    tracer = make("worker 0", ROOMY)
    step(tracer, 0, 100)
    step(tracer, 2_000_000_000, 3_000_000_000)
    tracer._flush()
    opening, *lines = tracer.path.read_text().splitlines()
    assert opening == "["
    assert len(spans([json.loads(line.rstrip(",")) for line in lines], "step")) == 2


def test_the_file_ends_at_its_limit_and_says_so(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    tracer = make("worker 0", 4_000)
    for number in range(100):
        step(tracer, number * 1_000, number * 1_000 + 900)
    assert tracer.path.stat().st_size < 4_300
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "PS_TRACE_MB" in caplog.text
    events = read(tracer.path)
    check(events)
    assert any("full" in event["args"]["labels"] for event in events if event["name"] == "process_labels")


def test_a_disk_that_fills_up_ends_the_trace_and_not_the_job(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    tracer = make("worker 0", ROOMY)
    assert tracer._file is not None
    tracer._file.close()
    tracer._file = Path("/dev/full").open("wb")  # noqa: SIM115 -- the tracer closes it
    for number in range(3):
        step(tracer, number * 2_000_000_000, number * 2_000_000_000 + 1_000_000_000)
    tracer.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "No space left" in caplog.text


def test_a_forked_child_leaves_the_file_alone(make: Make) -> None:
    tracer = make("worker 0", ROOMY)
    step(tracer, 0, 100)
    tracer._pid += 1
    tracer.close()
    assert tracer._file is not None
    tracer._pid -= 1


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file.*cannot be created"):
        make_tracer({"PS_TRACE": str(tmp_path / "file")}, "worker 0")


def test_settings(tmp_path: Path) -> None:
    assert make_tracer({}, "worker 0") is None
    assert make_tracer({"PS_TRACE": ""}, "worker 0") is None
    tracer = make_tracer({"PS_TRACE": str(tmp_path)}, "worker 0")
    assert isinstance(tracer, FileTracer)
    tracer.close()
    assert limit_bytes({}) == LIMIT_MB << 20
    assert limit_bytes({"PS_TRACE_MB": "3"}) == 3 << 20
    for wrong in ("0", "-1", "1.5", "many", "²"):
        with pytest.raises(ConfigError, match="PS_TRACE_MB"):
            limit_bytes({"PS_TRACE_MB": wrong})
