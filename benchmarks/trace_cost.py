"""CPU time that tracing adds to a step: ``python -m benchmarks.trace_cost [--off]``.

Runs what a worker and a shard do for the trace of one step, without the step, in this process, to files; with ``--off``
what they do where tracing is off. Between blocks of it a worker and a shard make steps without a trace. A row has both
CPU times and the median of their ratios, with its quartiles, for each size and transport. ``python -m benchmarks.paired
. --trace`` has whole steps, with what tracing makes slower beside its own work.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from time import monotonic_ns
from types import SimpleNamespace

from benchmarks.step_share import Cost, shares
from ps_protocol.cluster.answers import Outcome, StepAnswer
from ps_protocol.tracing.trace_file import FileTracer
from ps_server.consistency import WorkerKey
from ps_server.shard.step.push_trace import PushTracing
from ps_worker.step.push_trace import PushTrace

STEPS = 4_000
ANSWER = StepAnswer(1, Outcome.APPLIED, 1)


def worker_step(tracer: FileTracer, number: int) -> str:
    """What RemoteModel and ShardStream note of one step; returns the context that goes with the push."""
    span = tracer.begin("step", "model net", monotonic_ns(), {"model": "net", "rank": 0, "step": number})
    span.part("collect", monotonic_ns(), monotonic_ns())
    push = PushTrace(span, 0)
    context = span.traceparent
    push.sent(10_000)
    push.waits()
    push.arrives()
    push.received(ANSWER)
    span.part("load", monotonic_ns(), monotonic_ns())
    span.end(monotonic_ns())
    return context


def shard_step(tracing: PushTracing, context: str) -> None:
    """What StepStream and Applier note of one push."""
    push = tracing.begin(context, monotonic_ns())
    push.has_turn()
    began = monotonic_ns()
    push.logged(began, monotonic_ns())
    push.applied(began, monotonic_ns())
    push.may_go("")
    push.sends()
    push.end("APPLIED")


def traced(steps: int = STEPS) -> Cost:
    """CPU time of tracing, over ``steps`` steps."""
    with tempfile.TemporaryDirectory(prefix="ps-trace-cost-") as folder:
        worker, shard = (FileTracer(Path(folder), name, 1 << 30) for name in ("worker 0", "shard 0"))
        tracing = PushTracing(shard, WorkerKey(0, 1), "net", 0)
        begin = time.thread_time()
        contexts = [worker_step(worker, number) for number in range(steps)]
        worker.close()
        between = time.thread_time()
        for context in contexts:
            shard_step(tracing, context)
        shard.close()
        return Cost((between - begin) / steps, (time.thread_time() - between) / steps)


def untraced(steps: int = STEPS) -> Cost:
    """CPU time of asking whether there is a tracer, over ``steps`` steps, as often as worker and shard ask."""
    session = SimpleNamespace(instruments=SimpleNamespace(tracer=None))
    push = SimpleNamespace(trace=None)
    begin = time.thread_time()
    for _ in range(steps):
        trace = session.instruments.tracer
        _ = trace is None, trace is not None, trace is not None, trace is not None, trace is not None, trace is not None
        _ = push.trace is not None, push.trace is not None, trace is not None, trace is not None, trace is not None
    between = time.thread_time()
    for _ in range(steps):
        _ = session.instruments is not None, push.trace is not None, push.trace is not None, push.trace is not None
        traces = [each.trace for each in (push,) if each.trace is not None]
        _ = 0 if traces else 1, 0 if traces else 1, push.trace is not None, push.trace is not None
        for _ in traces:
            pass
        for _ in traces:
            pass
    return Cost((between - begin) / steps, (time.thread_time() - between) / steps)


def main() -> None:
    """Print a row for each size and transport."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--off", action="store_true", help="where tracing is off")
    for row in shares(untraced if parser.parse_args().off else traced):
        print(row, flush=True)


if __name__ == "__main__":
    main()
