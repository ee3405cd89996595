"""Traces of real steps: worker and shard in one picture, parts inside their spans, one trace per step."""

from __future__ import annotations

import pytest
import torch

from ps_protocol.errors import PsError
from ps_protocol.model.spec import Consistency, Mode
from ps_protocol.tracing.merge import MERGED, files_in, merge
from tests.end_to_end.table_training import OPTIMIZERS, TOP, on_shards, steps_of
from tests.end_to_end.table_training import train as train_rows
from tests.end_to_end.training import batches, loss_of, net, run_workers
from tests.support.shards import wait_until
from tests.support.trace_events import check, parts_of, process_names, read, spans
from tests.worker.jobs import running_job

STEPS = 6
SLACK_US = 0.002
"""Times are written with three digits after the point."""


@pytest.fixture
def traced(tmp_path, monkeypatch):
    """The folder of the trace files of whatever begins in this test."""
    folder = tmp_path / "traces"
    monkeypatch.setenv("PS_TRACE", str(folder))
    return folder


def train(cluster, steps=STEPS, **arguments):
    model = net()
    optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1, name="model", **arguments)
    for (batch,) in batches(steps):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    optimizer.finish()


def merged(folder):
    lines = merge(files_in(folder), folder / MERGED)
    assert len(lines) == 1
    assert lines[0].endswith("the clock of the axis")
    events = read(folder / MERGED)
    check(events)
    return events


def inside(inner, outer):
    begin, end = outer["ts"] - SLACK_US, outer["ts"] + outer["dur"] + SLACK_US
    return begin <= inner["ts"] and inner["ts"] + inner["dur"] <= end


def names_of(parts):
    return [part["name"] for part in parts]


def by_cause(events):
    """The pushes of each step, by the number of the step's span."""
    found = {}
    for push in spans(events, "push"):
        found.setdefault(push["args"]["parent_id"], []).append(push)
    return found


@pytest.mark.parametrize("transport", ["grpc", "bulk", "shm"])
def test_a_step_spans_the_worker_and_every_shard(traced, monkeypatch, transport):
    monkeypatch.setenv("PS_TRANSPORT", transport)
    with running_job(2) as job, job.cluster(rank=0, transport=transport) as cluster:
        train(cluster)
    events = merged(traced)
    assert sorted(process_names(events).values()) == ["shard 0", "shard 1", "worker 0"]
    steps, pushes = spans(events, "step"), by_cause(events)
    assert len(steps) == STEPS
    for number, step in enumerate(steps, 1):
        assert (step["args"]["rank"], step["args"]["step"], step["args"]["model"]) == (0, number, "model")
        found = names_of(parts_of(events, step))
        assert found[0] == "collect"
        assert found[-1] == "load"
        assert found.count("send") == found.count("wait") == found.count("receive") == 2
        assert {push["args"]["shard"] for push in pushes[step["args"]["span_id"]]} == {0, 1}
        for push in pushes[step["args"]["span_id"]]:
            assert push["args"]["trace_id"] == step["args"]["trace_id"]
            assert push["args"]["outcome"] == "APPLIED"
            # The shard sees that the worker has read the memory lent to it after the worker has gone on.
            if transport == "shm":
                assert step["ts"] <= push["ts"] <= step["ts"] + step["dur"]
            else:
                assert step["ts"] <= push["ts"]
            said = names_of(parts_of(events, push))
            assert said[0] == "receive"
            assert said[-1] == "send"
            assert {"apply", "log"} <= set(said)
    arrows = [event["id"] for event in events if event["ph"] == "s"]
    assert len(arrows) == len(set(arrows)) == 4 * STEPS
    assert set(arrows) == {event["id"] for event in events if event["ph"] == "f"}


def test_a_wait_has_its_reason_on_both_sides(traced):
    def after_the_other(cluster):
        """Train on two workers, rank 1 always after the shard has parked the pull of rank 0."""
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1, name="model")
        (stream,) = optimizer._model.pipeline.streams
        for (batch,) in batches(STEPS):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            if cluster.rank:
                wait_until(lambda: stream.values.status().parked_pulls)
            optimizer.step()

    with running_job(workers=2, consistency=Consistency(Mode.SYNC)) as job:
        run_workers(job, 2, after_the_other)
    events = merged(traced)
    waits = [wait for push in spans(events, "push") for wait in parts_of(events, push) if wait["name"] == "wait"]
    assert len(waits) == STEPS
    assert all(wait["args"]["reason"].startswith("waiting for worker ") for wait in waits)
    told = [part["args"].get("reason") for step in spans(events, "step") for part in parts_of(events, step)]
    assert {wait["args"]["reason"] for wait in waits} <= set(told)
    assert len(spans(events, "step")) == 2 * STEPS


def test_exchanges_beside_the_computation_are_traced_to_their_end(traced):
    with running_job(consistency=Consistency(Mode.ASYNC)) as job, job.cluster(rank=0) as cluster:
        train(cluster, overlap=True)
    events = merged(traced)
    steps = spans(events, "step")
    assert len(steps) == STEPS
    assert len(by_cause(events)) == STEPS
    reasons = [part["args"].get("reason") for step in steps for part in parts_of(events, step)]
    assert "the exchange of the last step" in reasons


def test_payloads_in_a_wire_format_show_their_encoding(traced):
    with running_job() as job, job.cluster(rank=0, transport="grpc") as cluster:
        train(cluster, wire="int8")
    events = merged(traced)
    assert all("encode" in names_of(parts_of(events, step)) for step in spans(events, "step"))


def test_rows_that_are_waited_for_are_a_span_of_their_own(traced):
    with running_job(2, 1) as job, job.cluster() as cluster:
        model = on_shards(cluster, "sum", OPTIMIZERS["sgd"][0], shared=True)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=TOP, name="rows")
        train_rows(cluster, model, optimizer, [step[0] for step in steps_of(1, STEPS, 1)])
    lookups = spans(events := merged(traced), "lookup")
    assert len(lookups) >= STEPS
    for lookup in lookups:
        assert lookup["args"]["rows"] > 0
        assert names_of(parts_of(events, lookup)) == ["wait", "place"]


def test_a_refused_step_ends_its_span(traced):
    with running_job() as job, job.cluster(rank=0) as cluster:
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float("nan"))
        with pytest.raises(PsError):
            optimizer.step()
        optimizer.zero_grad()
        loss_of(model, batches(1)[0][0]).backward()
        optimizer.step()
    events = merged(traced)
    assert len(spans(events, "step")) == 2
    assert len(spans(events, "push")) == 1


def test_a_shard_whose_worker_does_not_trace_records_nothing(tmp_path, monkeypatch):
    with running_job(start_shards=0) as job:
        monkeypatch.setenv("PS_TRACE", str(tmp_path))
        job.start_shard(0)
        job.wait_for_shards()
        monkeypatch.delenv("PS_TRACE")
        with job.cluster(rank=0) as cluster:
            train(cluster)
    assert spans(merged(tmp_path)) == []


def test_the_spans_of_opentelemetry_are_children_across_processes(monkeypatch):
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="needs opentelemetry-sdk")
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setenv("PS_TRACE", "otel")
    script = provider.get_tracer("script")
    with running_job(2) as job, job.cluster(rank=0) as cluster, script.start_as_current_span("epoch") as epoch:
        train(cluster, 2)
    found = exporter.get_finished_spans()
    by_id = {span.context.span_id: span for span in found}
    steps = [span for span in found if span.name == "step"]
    assert [step.parent.span_id for step in steps] == [epoch.get_span_context().span_id] * 2
    pushes = [span for span in found if span.name == "push"]
    assert len(pushes) == 4
    assert {by_id[push.parent.span_id].name for push in pushes} == {"step"}
    assert {by_id[span.parent.span_id].name for span in found if span.name == "apply"} == {"push"}
    assert {by_id[span.parent.span_id].name for span in found if span.name == "collect"} == {"step"}
    assert {span.context.trace_id for span in found} == {epoch.get_span_context().trace_id}
    for span in found:
        if span.parent is not None and span.parent.span_id in by_id and span.name not in ("push", "send"):
            parent = by_id[span.parent.span_id]
            assert parent.start_time <= span.start_time <= span.end_time <= parent.end_time
