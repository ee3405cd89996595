import json
from pathlib import Path

import pytest

from ps_protocol.errors import DamagedData, InvalidRequest
from ps_protocol.tracing import trace_file
from ps_protocol.tracing.clock import ClockReading, read_clock
from ps_protocol.tracing.merge import MERGED, TraceFile, align, files_in, merge
from ps_protocol.tracing.trace_file import FileTracer
from tests.support.trace_events import check, process_names, read, spans

ROOMY = 1 << 20

HEAD = '{"process":"worker 0","clock":{"name":"c","monotonic_ns":1,"wall_ns":2}}\n'


def job(folder: Path, monkeypatch: pytest.MonkeyPatch, ahead_ns: int, name: str = "other host") -> None:
    """A worker, and a shard whose clock is ``ahead_ns`` of the worker's; a step takes 1 ms, 0.1 ms of it each way."""
    worker = FileTracer(folder, "worker 0", ROOMY)
    clock = read_clock()
    other = ClockReading(name, clock.monotonic_ns + ahead_ns, clock.wall_ns) if name else clock
    monkeypatch.setattr(trace_file, "read_clock", lambda: other)
    shard = FileTracer(folder, "shard 0", ROOMY)
    for begin in range(0, 50_000_000, 10_000_000):
        step = worker.begin("step", "model", begin, {})
        push = shard.begin("push", "worker 0", begin + 100_000 + ahead_ns, {}, step.traceparent)
        step.part("send", begin, begin + 50_000, sends=f"{step.key}.0")
        push.part("receive", begin + 100_000 + ahead_ns, begin + 200_000 + ahead_ns, receives=f"{step.key}.0")
        push.part("send", begin + 900_000 + ahead_ns, begin + 950_000 + ahead_ns, sends=f"{step.key}.0.answer")
        push.end(begin + 960_000 + ahead_ns)
        step.part("receive", begin + 1_000_000, begin + 1_100_000, receives=f"{step.key}.0.answer")
        step.end(begin + 1_200_000)
    for tracer in (worker, shard):
        tracer.close()


@pytest.mark.parametrize("ahead_ns", [7_200_000_000_000, -3_000_000, 0])
def test_clocks_of_two_hosts_are_aligned_by_their_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_ns: int
) -> None:
    job(tmp_path, monkeypatch, ahead_ns)
    lines = merge(files_in(tmp_path), tmp_path / MERGED)
    assert sorted(lines) == ["shard 0: the clock of the axis", "worker 0: aligned by round trips, within 0.100 ms"]
    events = read(tmp_path / MERGED)
    check(events)
    assert sorted(process_names(events).values()) == ["shard 0", "worker 0"]
    for step, push in zip(spans(events, "step"), spans(events, "push"), strict=True):
        assert push["args"]["parent_id"] == step["args"]["span_id"]
        assert push["args"]["trace_id"] == step["args"]["trace_id"]
        assert step["ts"] <= push["ts"]
        assert push["ts"] + push["dur"] <= step["ts"] + step["dur"]


def test_processes_of_one_host_need_no_alignment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job(tmp_path, monkeypatch, 0, name="")
    assert merge(files_in(tmp_path), tmp_path / MERGED) == ["shard 0, worker 0: the clock of the axis"]
    assert min(span["ts"] for span in spans(read(tmp_path / MERGED))) == 0
    # The file made is not one of those it is made of.
    assert len(files_in(tmp_path)) == 2


def at(name: str, sent: dict[str, int], received: dict[str, int], wall_ns: int = 0) -> TraceFile:
    return TraceFile(Path(f"{name}.trace"), name, ClockReading(name, 0, wall_ns), sent, received)


def test_a_clock_is_aligned_over_another_and_by_the_wall_clock_where_no_message_helps() -> None:
    found = align(
        [
            at("a", {"1": 0}, {"2": 20}),
            at("a", {}, {}),
            at("b", {"2": 1_010, "3": 1_050}, {"1": 1_010, "4": 1_060}),
            at("c", {"4": 5_055}, {"3": 5_055}),
            at("alone", {}, {}, 700),
            at("one way", {}, {"1": 9}, 900),
        ]
    )
    assert {name: each.offset_ns for name, each in found.items()} == {
        "a": 0,
        "b": -1_000,
        "c": -5_000,
        "alone": 700,
        "one way": 900,
    }
    assert found["a"].uncertainty_ns == 0
    assert found["b"].uncertainty_ns == 10
    assert found["c"].uncertainty_ns == 15
    assert found["alone"].uncertainty_ns is None
    assert str(found["alone"]) == "aligned by the wall clock"


def test_a_last_line_that_was_not_written_whole_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job(tmp_path, monkeypatch, 0)
    path = next(path for path in files_in(tmp_path) if path.name.startswith("worker"))
    text = path.read_text()
    head, *lines = text.splitlines(keepends=True)
    path.write_text(head + lines[0] + lines[0][:30])
    merge(files_in(tmp_path), tmp_path / MERGED)
    events = read(tmp_path / MERGED)
    check(events)
    assert len(spans(events, "step")) == len(json.loads(lines[0]))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "line 1 of"),
        ("{broken\n", "line 1 of"),
        ("[]\n", "no trace file"),
        ('{"process":"worker 0"}\n', "no trace file"),
        ('{"process":"worker 0","clock":{"name":"x"}}\n', "no trace file"),
        (HEAD + "{broken\n", "line 2 of"),
        (HEAD + "7\n", "line 2 of"),
        (HEAD + "[[1,2,3]]\n", "line 2 of"),
        (HEAD + '[["step","t",0,"soon",{},"1","2","",[],[]]]\n', "line 2 of"),
        (HEAD + '[["step","t",0,1,{},"1","2","",[["wait",0]],[]]]\n', "line 2 of"),
        (HEAD + '[["step","t",0,1,{},"1","2","",[],[["unknown",0]]]]\n', "line 2 of"),
        (HEAD + '[["step","t",0,1,{},"1","2","",[],[["sent",0,1,2]]]]\n', "line 2 of"),
        (HEAD + '[["step","t",0,1,{},"1","2","",[],[["served",0,1,"x",3,4,5,6,7,8,9,10,11,12,""]]]]\n', "line 2 of"),
        (HEAD + '[["step","t",0,1,{},"1","2","",[],[[]]]]\n', "line 2 of"),
    ],
)
def test_a_file_of_others_is_refused_by_name(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "odd.trace").write_text(text)
    with pytest.raises(DamagedData, match=why) as caught:
        merge(files_in(tmp_path), tmp_path / MERGED)
    assert "odd.trace" in str(caught.value)


def test_no_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no trace files"):
        merge(files_in(tmp_path), tmp_path / MERGED)


def test_the_clock_of_two_readings_is_the_same() -> None:
    first, second = read_clock(), read_clock()
    assert first.name == second.name
    assert first.monotonic_ns <= second.monotonic_ns
    json.dumps(first.name)
