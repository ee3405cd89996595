"""A traced push whose answer waits for the standby shows for how long. One pair in this process: about a second."""

from __future__ import annotations

import threading

from ps_protocol.tracing.merge import MERGED, merge
from ps_protocol.tracing.trace_file import FileTracer
from ps_server.shard.config import Acknowledge
from tests.shard.standby.support import follower, primary
from tests.support.shards import StubStream, flat, gradients, start, wait_until
from tests.support.trace_events import check, parts_of, read, spans


def test_the_wait_for_the_standby_is_a_part_of_the_push_between_its_update_and_its_answer(tmp_path):
    held = threading.Event()
    worker, tracer = (FileTracer(tmp_path / "traces", name, 1 << 20) for name in ("worker 0", "shard 0"))
    with (
        primary(tmp_path / "a", Acknowledge.AFTER, tracer=tracer) as shard,
        follower(tmp_path / "b") as following,
    ):
        model, _ = start(shard)
        following.begin(shard)
        following.reach(shard)
        shard.covered()

        async def block() -> None:
            following.follower._executor.submit(lambda: held.wait(60), 1 << 62)

        following.loop.run(block())
        step = worker.begin("step", "model", 0, {})
        stream = StubStream(shard)
        stream.push(flat(model.layout, *gradients(model, 1)), traceparent=step.traceparent)
        wait_until(lambda: bool(shard.replication._waiting))
        held.set()
        stream.result()
        stream.end()
    tracer.close()
    worker.close()
    merge([tracer.path], tmp_path / MERGED)
    events = read(tmp_path / MERGED)
    check(events)
    (push,) = spans(events, "push")
    parts = parts_of(events, push)
    assert [part["name"] for part in parts if part["name"] != "log"] == ["receive", "apply", "standby", "send"]
