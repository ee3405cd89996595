"""Whether a process counts as hanging: by its signs of life, and by the time that its watcher itself has seen."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from ps_protocol.errors import ConfigError
from ps_protocol.launch.life import VARIABLE, LifePipe, LifeWatch, StopWatch, _is_stopped, showing_life, take_life_pipe
from ps_protocol.times import HANGS_SECONDS, STARTS_SECONDS
from tests.support.shards import wait_until


def watched(watch: LifeWatch, begin: float, seconds: float, step: float = 1.0) -> bool:
    """Whether it hangs after ``seconds`` of looks without a sign."""
    hangs = False
    for number in range(1, int(seconds / step) + 1):
        hangs = watch.look(shown=False, now=begin + number * step)
    return hangs


def test_a_process_hangs_that_has_shown_no_life_for_the_limit() -> None:
    watch = LifeWatch(100.0)
    assert not watch.look(shown=True, now=101.0)
    assert not watched(watch, 101.0, HANGS_SECONDS - 1)
    assert watch.look(shown=False, now=101.0 + HANGS_SECONDS)
    assert not watch.look(shown=True, now=102.0 + HANGS_SECONDS)


def test_before_its_first_sign_it_has_the_time_of_a_start() -> None:
    assert not watched(LifeWatch(0.0), 0.0, STARTS_SECONDS - 1)
    assert watched(LifeWatch(0.0), 0.0, STARTS_SECONDS)


def test_a_watcher_that_stood_still_does_not_take_that_for_a_death() -> None:
    watch = LifeWatch(0.0)
    watch.look(shown=True, now=1.0)
    # Its machine was asleep, or it was stopped itself; it looks before the process has had a chance to show life.
    assert not watch.look(shown=False, now=7200.0)
    assert watch.silent_seconds == 2.0
    # On a machine so busy that it looks every ten seconds only, the limit is five times as long.
    assert not watched(watch, 7200.0, HANGS_SECONDS, step=10.0)
    assert watched(watch, 7200.0 + HANGS_SECONDS, 5 * HANGS_SECONDS, step=10.0)


def test_work_shows_life_until_it_ends_and_its_error_is_raised(monkeypatch: Any) -> None:
    monkeypatch.setattr("ps_protocol.times.LIFE_SECONDS", 60.0)
    pipe = LifePipe(0.0)

    async def work() -> None:
        await asyncio.sleep(0.01)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(showing_life(work(), pipe.inherited[0]))
    assert os.read(pipe._read_end, 10) == b"."
    pipe.started()
    pipe.close()


def test_nobody_watches_a_process_without_the_variable_and_it_works_all_the_same() -> None:
    ran: list[int] = []

    async def work() -> None:
        ran.append(1)

    assert take_life_pipe({}) is None
    asyncio.run(showing_life(work(), None))
    assert ran


def test_a_watcher_that_stands_still_or_has_gone_does_not_disturb_the_process(monkeypatch: Any) -> None:
    monkeypatch.setattr("ps_protocol.times.LIFE_SECONDS", 0.0)
    for watched_by_nobody in (False, True):
        read_end, write_end = os.pipe()
        take_life_pipe({VARIABLE: str(write_end)})
        if watched_by_nobody:
            os.close(read_end)

        async def work() -> None:
            for _ in range(70_000 if not watched_by_nobody else 10):  # noqa: B023 -- awaited here
                await asyncio.sleep(0)

        asyncio.run(showing_life(work(), write_end))
        os.close(write_end)
        if not watched_by_nobody:
            os.close(read_end)


@pytest.mark.parametrize("text", ["77777", "-1", "stderr", "1e9", "9" * 40])
def test_what_names_no_pipe_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"{VARIABLE} names no open pipe"):
        take_life_pipe({VARIABLE: text})


def test_a_file_in_the_place_of_a_pipe_is_refused_and_children_do_not_inherit_the_variable() -> None:
    with open(os.devnull) as file, pytest.raises(ConfigError):  # noqa: PTH123 -- its number counts
        take_life_pipe({VARIABLE: str(file.fileno())})
    pipe = LifePipe(0.0)
    environment = dict(pipe.variables)
    assert take_life_pipe(environment) == pipe.inherited[0]
    assert environment == {}
    pipe.started()
    pipe.close()


def test_the_life_of_another_process_is_seen_and_its_silence_too() -> None:
    pipe = LifePipe(0.0)
    program = f"import os; os.write(int(os.environ['{VARIABLE}']), b'.'); input()"
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program],
        env=pipe.variables,
        pass_fds=pipe.inherited,
        stdin=subprocess.PIPE,
    )
    pipe.started()
    wait_until(lambda: pipe._shown())
    now = 0.0
    while not (why := pipe.hangs(child.pid, now := now + 1.0)):
        pass
    assert why == f"it has shown no life for {STARTS_SECONDS:.0f} s"
    child.kill()
    child.communicate()
    pipe.close()


def test_a_stopped_process_hangs_and_one_that_goes_on_or_has_ended_does_not() -> None:
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
    watch = StopWatch(1.0)
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: _is_stopped(child.pid))
    said = [watch.hangs(child.pid, float(now)) for now in range(2, 32)]
    assert said[-1] == "it has been stopped for 30 s"
    assert not any(said[:-1])
    child.send_signal(signal.SIGCONT)
    wait_until(lambda: not _is_stopped(child.pid))
    assert watch.hangs(child.pid, 33.0) == ""
    child.kill()
    child.communicate()
    assert watch.hangs(child.pid, 34.0) == ""
