import logging
import sys

import pytest

trace_sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="needs opentelemetry-sdk")

from opentelemetry.sdk.trace import TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF  # noqa: E402

from ps_protocol.errors import ConfigError  # noqa: E402
from ps_protocol.tracing.context import parse_traceparent  # noqa: E402
from ps_protocol.tracing.opentelemetry_spans import OpenTelemetryTracer  # noqa: E402
from ps_protocol.tracing.settings import make_tracer  # noqa: E402


def test_spans_of_two_processes_are_one_trace() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    worker, shard = OpenTelemetryTracer(provider), OpenTelemetryTracer(provider)
    step = worker.begin("step", "model a", 1_000, {"rank": 1})
    push = shard.begin("push", "worker 1", 2_000, {}, step.traceparent)
    push.part("apply", 2_500, 3_000, {"model": "a"})
    push.end(4_000)
    step.end(5_000, {"outcome": "applied"})
    found = {span.name: span for span in exporter.get_finished_spans()}
    assert set(found) == {"step", "push", "apply"}
    assert found["step"].parent is None
    assert found["push"].parent.span_id == found["step"].context.span_id
    assert found["apply"].parent.span_id == found["push"].context.span_id
    assert len({span.context.trace_id for span in found.values()}) == 1
    assert parse_traceparent(step.traceparent).span == f"{found['step'].context.span_id:016x}"
    assert found["step"].attributes == {
        "torch_ps.rank": 1,
        "torch_ps.track": "model a",
        "torch_ps.outcome": "applied",
    }
    assert found["apply"].end_time - found["apply"].start_time == 500
    assert found["step"].end_time - found["step"].start_time == 4_000


def test_what_the_worker_does_not_sample_the_shard_does_not_record() -> None:
    exporter = InMemorySpanExporter()
    recording = TracerProvider()
    recording.add_span_processor(SimpleSpanProcessor(exporter))
    step = OpenTelemetryTracer(TracerProvider(sampler=ALWAYS_OFF)).begin("step", "model", 0, {})
    OpenTelemetryTracer(recording).begin("push", "worker 0", 1, {}, step.traceparent).end(2)
    assert step.traceparent.endswith("-00")
    assert exporter.get_finished_spans() == ()


def test_a_process_without_an_sdk_is_told_once_and_sends_no_context(caplog: pytest.LogCaptureFixture) -> None:
    from opentelemetry.trace import NoOpTracerProvider

    tracer = OpenTelemetryTracer(NoOpTracerProvider())
    spans = [tracer.begin("step", "model", 0, {}) for _ in range(3)]
    assert [span.traceparent for span in spans] == ["", "", ""]
    for span in spans:
        span.part("send", 0, 1, sends=f"{span.key}.0")
        span.end(2)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "ps_protocol.tracing.opentelemetry_spans")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"torch-ps\[trace\]"):
        make_tracer({"PS_TRACE": "otel"}, "worker 0")


def test_the_package_is_imported_only_where_it_is_asked_for(tmp_path) -> None:
    import subprocess

    code = (
        "import sys; from ps_protocol.tracing.settings import make_tracer; "
        f"make_tracer({{'PS_TRACE': {str(tmp_path)!r}}}, 'worker 0').close(); "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
