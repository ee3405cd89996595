import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.tracing.merge import MERGED, merge
from ps_protocol.tracing.rows import cut
from ps_protocol.tracing.trace_file import FileTracer
from ps_server.consistency import WorkerKey
from ps_server.shard.step.push_trace import PushTracing
from tests.support.trace_events import check, read, spans

TIMES = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted).map(tuple)


@given(TIMES, TIMES)
def test_a_wait_and_an_update_nest_and_the_wait_only_gets_shorter(wait, apply):
    begin, end = cut(wait, apply)
    assert wait[0] <= begin <= end <= wait[1]
    apart = end <= apply[0] or apply[1] <= begin
    assert apart or apply[0] <= begin <= end <= apply[1] or begin <= apply[0] <= apply[1] <= end
    if wait[1] <= apply[0] or apply[1] <= wait[0]:
        assert (begin, end) == wait


@pytest.fixture
def tracer(tmp_path):
    tracer = FileTracer(tmp_path, "shard 0", 1 << 20)
    yield tracer
    tracer.close()


def picture(tracer):
    tracer.close()
    target = tracer.path.with_name(MERGED)
    merge([tracer.path], target)
    events = read(target)
    check(events)
    return events


def served(tracer):
    step = tracer.begin("step", "model m", 0, {})
    return PushTracing(tracer, WorkerKey(3, 9), "m", 0).begin(step.traceparent, 1_000)


def test_an_update_after_the_answer_is_not_part_of_the_push(tracer):
    push = served(tracer)
    push.end("DUPLICATE")
    push.logged(1, 2)
    push.applied(1, 2)
    events = picture(tracer)
    assert [event["name"] for event in spans(events)] == ["push", "receive"]


def test_a_push_that_is_never_answered_says_why(tracer):
    push = served(tracer)
    push.has_turn()
    push.end("not answered: the stream ended")
    (span,) = spans(picture(tracer), "push")
    assert span["args"]["outcome"] == "not answered: the stream ended"
    assert (span["args"]["rank"], span["args"]["shard"], span["args"]["model"]) == (3, 0, "m")
