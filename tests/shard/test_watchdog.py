"""A piece of work that does not end, ends the process: a lost shard is replaced, a stuck one is not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from ps_server.shard.execution.executor import INLINE_WORK_BYTES, ShardExecutor
from ps_server.shard.execution.watchdog import EXIT_STUCK, Watchdog


def _never_ends(begun: threading.Event, release: threading.Event) -> None:
    begun.set()
    assert release.wait(60)


def _looks_until_stuck(watchdog: Watchdog, most: int) -> int:
    """Looks since the work was first seen."""
    assert not watchdog.look()
    for looks in range(1, most + 1):
        if watchdog.look():
            return looks
    raise AssertionError(f"not found stuck in {most} looks")


@pytest.mark.parametrize(("nbytes", "looks"), [(INLINE_WORK_BYTES, 4), (50_000_000, 9)])
def test_work_is_stuck_after_the_limit_and_the_time_for_its_bytes_and_its_stack_is_told(nbytes: int, looks: int):
    told: list[str] = []
    watchdog = Watchdog(3.0, told.append)
    begun, release = threading.Event(), threading.Event()

    async def stuck() -> None:
        executor = ShardExecutor(1, watchdog)
        work = executor.submit(lambda: _never_ends(begun, release), nbytes)
        assert await asyncio.to_thread(begun.wait, 60)
        assert _looks_until_stuck(watchdog, 20) == looks
        release.set()
        await work
        executor.close()

    asyncio.run(stuck())
    (report,) = told
    assert "_never_ends" in report
    assert f"code {EXIT_STUCK}" in report
    assert not watchdog.look()


def test_work_that_ends_and_work_without_end_of_another_piece_are_not_stuck():
    watchdog = Watchdog(1.0, lambda report: pytest.fail(report))
    for _ in range(10):
        watchdog.work = 0, threading.get_ident()
        assert not watchdog.look()
        assert not watchdog.look()
        watchdog.work = None
    assert not watchdog.look()


def test_work_that_raises_has_ended():
    watchdog = Watchdog(0.0, lambda report: pytest.fail(report))

    async def raising() -> None:
        executor = ShardExecutor(1, watchdog)
        with pytest.raises(ZeroDivisionError):
            await executor.submit(lambda: 1 // 0, 0)
        executor.close()

    asyncio.run(raising())
    assert not any(watchdog.look() for _ in range(10))


def test_it_looks_from_a_thread_of_its_own_until_it_is_closed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ps_server.shard.times.WATCH_SECONDS", 0.001)
    found = threading.Event()
    watchdog = Watchdog(0.0, lambda report: found.set())
    watchdog.start()
    watchdog.work = 0, threading.get_ident()
    assert found.wait(60)
    watchdog.close()
    idle = Watchdog()
    idle.start()
    idle.close()
    assert not idle._thread.is_alive()


def test_the_process_ends_with_a_code_of_its_own_although_its_log_is_stuck_too():
    script = (
        "import logging, threading, ps_server.shard.execution.watchdog as w\n"
        "class Stuck(logging.Handler):\n"
        "    def emit(self, record): threading.Event().wait()\n"
        "logging.getLogger().addHandler(Stuck())\n"
        "w.end_process('stuck', 0.01)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == EXIT_STUCK
