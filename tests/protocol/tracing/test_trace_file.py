import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ps_protocol.errors import ConfigError
from ps_protocol.tracing.context import parse_traceparent
from ps_protocol.tracing.merge import MERGED, merge
from ps_protocol.tracing.settings import LIMIT_MB, limit_bytes, make_tracer
from ps_protocol.tracing.trace_file import BATCH, EARLIER, FileTracer
from tests.support.trace_events import Event, check, parts_of, process_names, read, spans

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


def picture(*tracers: FileTracer) -> list[Event]:
    """The events of the files of ``tracers``, which end."""
    for tracer in tracers:
        tracer.close()
    target = tracers[0].path.with_name(MERGED)
    merge([tracer.path for tracer in tracers], target)
    events = read(target)
    check(events)
    return events


def step(tracer: FileTracer, begin: int, end: int, track: str = "model a") -> str:
    span = tracer.begin("step", track, begin, {"rank": 3})
    span.part("send", begin + 1, begin + 10, {"shard": 0}, sends=f"{span.key}.0")
    span.part("wait", begin + 10, end, receives=f"{span.key}.0.answer")
    span.end(end, {"outcome": "applied"})
    return span.traceparent


def test_a_closed_file_is_an_array_of_events_with_parts_inside_their_span(make: Make) -> None:
    tracer = make("worker 3", ROOMY)
    told = step(tracer, 1_000, 2_000)
    events = picture(tracer)
    assert process_names(events) == {1: "worker 3"}
    (whole,) = spans(events, "step")
    context = parse_traceparent(told)
    assert context
    assert whole["args"] == {
        "rank": 3,
        "outcome": "applied",
        "trace_id": context.trace,
        "span_id": context.span,
        "parent_id": "",
    }
    assert (whole["ts"], whole["dur"]) == (1.0, 1.0)
    assert [each["name"] for each in parts_of(events, whole)] == ["send", "wait"]
    assert {event["ph"]: event["id"] for event in events if event["ph"] in "sf"} == {
        "s": f"{context.span}.0",
        "f": f"{context.span}.0.answer",
    }
    assert tracer.path.stat().st_mode & 0o777 == 0o600


def test_a_span_caused_by_another_process_has_its_trace_and_names_it(make: Make) -> None:
    worker, shard = make("worker 0", ROOMY), make("shard 0", ROOMY)
    cause = worker.begin("step", "model a", 0, {})
    for text in (cause.traceparent, "no context"):
        shard.begin("push", "worker 0", 5, {}, text).end(6)
    cause.end(9)
    events = picture(worker, shard)
    (whole,) = spans(events, "step")
    effect, stranger = spans(events, "push")
    assert effect["args"]["trace_id"] == whole["args"]["trace_id"] != stranger["args"]["trace_id"]
    assert (effect["args"]["parent_id"], stranger["args"]["parent_id"]) == (cause.key, "")
    assert len({each["args"]["span_id"] for each in (whole, effect, stranger)}) == 3


def test_spans_of_a_track_that_overlap_get_lines_of_their_own(make: Make) -> None:
    tracer = make("shard 0", ROOMY)
    for begin, end in ((0, 100), (50, 150), (100, 200), (150, 160)):
        step(tracer, begin, end, "worker 0")
    events = picture(tracer)
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["worker 0", "worker 0 (2)"]


def test_names_from_outside_are_escaped(make: Make) -> None:
    tracer = make("worker 0", ROOMY)
    name = 'a"}],\n\x1b[2J\u202e\U0001f600\udc80\\'
    tracer.begin("step", name, 0, {"model": name}).end(10)
    (whole,) = spans(picture(tracer))
    assert b"\x1b" not in tracer.path.with_name(MERGED).read_bytes()
    assert whole["args"]["model"].isprintable()


def test_what_a_killed_process_wrote_is_readable(make: Make) -> None:
    tracer = make("worker 0", ROOMY)
    for number in range(BATCH + 1):
        step(tracer, number, number)
    header, batch = tracer.path.read_text().splitlines()
    assert json.loads(header)["process"] == "worker 0"
    assert len(json.loads(batch)) == BATCH


def test_at_the_limit_the_newest_steps_are_kept_in_order_and_it_says_so_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    tracer = make("worker 0", 4_000)
    seconds = range(0, 200, 2)
    for second in seconds:
        step(tracer, second * 1_000_000_000, second * 1_000_000_000 + 900)
    earlier = tracer.path.with_suffix(EARLIER)
    assert 2_000 < tracer.path.stat().st_size + earlier.stat().st_size <= 4_000
    assert earlier.stat().st_mode & 0o777 == 0o600
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "PS_TRACE_MB" in caplog.text
    kept = [round(span["ts"] / 1e6) for span in spans(picture(tracer), "step")]
    assert 5 <= len(kept) < len(seconds)
    assert kept == list(seconds)[-len(kept) :]


def test_a_disk_that_fills_up_ends_the_trace_and_not_the_job(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    tracer = make("worker 0", ROOMY)
    assert tracer._file is not None
    tracer._file.close()
    tracer._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 -- the tracer closes it
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
