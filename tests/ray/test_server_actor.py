"""The actor of a server without Ray: a light program stands for the server. Costs 1 s of CPU."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ps_protocol import times
from ps_protocol.errors import Unavailable
from ps_protocol.launch import shim
from ps_worker import own_server
from ps_worker.ray.actors import ServerActor, WorkerActor
from ps_worker.ray.plan import RayPlan, ServerKind, ServerName, worker_environment
from tests.support.shards import wait_until


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """An actor has its process for itself, and its variables: here they are taken back."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


SERVER = """
import os, signal, sys
file = sys.argv[sys.argv.index("--ready-file") + 1]
if "dies" in sys.argv:
    print("no such folder", file=sys.stderr)
    sys.exit(2)
if "lives" in sys.argv:
    import time
    os.write(int(os.environ["PS_LIFE_FD"]), b".")
if "unsaved" in sys.argv:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
for _ in range("hangs" not in sys.argv and 1 + sys.argv.count("again")):
    with open(file, "w") as told:
        told.write(f"127.0.0.1:9 of {os.getpid()}\\n")
if "lives" in sys.argv:
    while True:
        os.write(int(os.environ["PS_LIFE_FD"]), b".")
        time.sleep(0.1)
if "unsaved" in sys.argv:
    signal.sigwait({signal.SIGTERM})
    print("no room")
    sys.exit(74)
signal.pause()
"""

NAME = ServerName(ServerKind.SHARD, 1)


@contextmanager
def serving(*more: str, name: ServerName = NAME, **settings: Any) -> Iterator[tuple[ServerActor, list[str]]]:
    """An actor that serves in a thread, and where the result of ``serve`` comes."""
    plan = RayPlan(shards=2, workers=1, shard_options=more, coordinator_options=more, **settings)
    actor = ServerActor(name, plan, "127.0.0.1")
    ends: list[str] = []
    thread = threading.Thread(target=lambda: ends.append(actor.serve("127.0.0.1:7000")))
    thread.start()
    try:
        yield actor, ends
    finally:
        wait_until(lambda: actor._server is not None)
        actor.stop(60.0)
        thread.join(60.0)
        assert not thread.is_alive()


@pytest.fixture(autouse=True)
def _light_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Programs of Python ``-m`` are that server; temporary files would be in ``tmp_path``."""
    command = shim.command
    monkeypatch.setattr(shim, "command", lambda program: command([sys.executable, "-S", "-c", SERVER, *program[4:]]))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_server_is_served_until_it_is_stopped_and_leaves_nothing(tmp_path: Path) -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with serving() as (actor, ends):
        assert actor.address(60.0).startswith("127.0.0.1:9")
        assert list(tmp_path.iterdir()) == []
        actor.stop(60.0)
        wait_until(lambda: bool(ends))
        assert ends == ["shard 1 was stopped; its log is empty"]
    # Fewer: what earlier tests left may be closed meanwhile, and other threads have some open for a moment.
    wait_until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= descriptors)


def test_a_standby_can_write_its_address_again(tmp_path: Path) -> None:
    with serving("again", data_dir=tmp_path / "kept", standbys=True) as (actor, _):
        assert actor.address(60.0).startswith("127.0.0.1:9")
        assert actor._server is not None
        assert not actor._server.join(0.2)


ACTOR = """
import sys, threading
from pathlib import Path
from ps_protocol.launch import shim
from ps_worker.ray.actors import RayPlan, ServerActor
from tests.ray.test_server_actor import NAME, SERVER
command = shim.command
shim.command = lambda program: command([sys.executable, "-S", "-c", SERVER, *program[4:]])
actor = ServerActor(NAME, RayPlan(shards=2, workers=1, shard_options=("hangs",)), "127.0.0.1")
threading.Thread(target=actor.serve, args=("127.0.0.1:7000",), daemon=True).start()
while actor._server is None:
    pass
print("starts", flush=True)
threading.Event().wait()
"""


def test_an_actor_that_is_killed_while_its_server_starts_leaves_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", ACTOR]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "starts\n"
        process.kill()
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_a_server_is_told(tmp_path: Path) -> None:
    with serving() as (actor, ends):
        pid = int(actor.address(60.0).rpartition(" ")[2])
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: bool(ends))
        assert ends == ["shard 1 was killed by signal 9; its log is empty"]


def stop(actor: ServerActor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop its server. From then on, and not before, a second without life is too long."""
    server = actor._server
    assert server is not None
    assert server._child is not None
    assert server._child._watch is not None
    os.kill(server.pid, signal.SIGSTOP)
    # For the next sign of life, which may have come before the signal, and for the last one.
    monkeypatch.setattr(times, "HANGS_SECONDS", 1.0)
    server._child._watch._watch._limit_seconds = 1.0


def test_a_coordinator_that_is_stopped_is_killed_and_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_server, "_WATCH_SECONDS", 0.05)
    with serving("lives", name=ServerName(ServerKind.COORDINATOR)) as (actor, ends):
        pid = int(actor.address(60.0).rpartition(" ")[2])
        assert actor.process() == (socket.gethostname(), pid)
        stop(actor, monkeypatch)
        wait_until(lambda: bool(ends))
        assert re.fullmatch(
            r"the coordinator hung and was killed: it has shown no life for \d+ s; its log is empty", ends[0]
        )


def test_a_shard_that_is_stopped_is_killed_and_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_server, "_WATCH_SECONDS", 0.05)
    with serving() as (actor, ends):
        actor.address(60.0)
        stop(actor, monkeypatch)
        wait_until(lambda: bool(ends))
        assert re.fullmatch(r"shard 1 hung and was killed: it has been stopped for \d+ s; its log is empty", ends[0])


def test_the_last_words_of_a_coordinator_that_could_not_save_are_told_at_its_stop() -> None:
    with serving("unsaved", name=ServerName(ServerKind.COORDINATOR)) as (actor, _):
        actor.address(60.0)
        assert actor.stop(60.0) == "its log ends with: no room"


def test_a_server_that_does_not_start_is_an_error_with_its_last_lines() -> None:
    with serving("dies") as (actor, ends), pytest.raises(Unavailable, match="shard 1 exited with code 2") as raised:
        actor.address(60.0)
    assert raised.value.actual == "its log ends with: no such folder"
    assert ends == ["shard 1 exited with code 2; its log ends with: no such folder"]


def test_a_server_that_takes_too_long_is_an_error() -> None:
    with serving("hangs") as (actor, _), pytest.raises(Unavailable, match="shard 1 did not start within 0 s"):
        actor.address(0.1)


def test_a_server_that_is_stopped_before_it_starts_ends_at_once() -> None:
    # It has no address, however late it is ended.
    actor = ServerActor(NAME, RayPlan(shards=2, workers=1, shard_options=("hangs",)), "127.0.0.1")
    actor.stop(0.0)
    assert actor.serve("127.0.0.1:7000").startswith("shard 1 was stopped")
    with pytest.raises(Unavailable, match="shard 1 was stopped"):
        actor.address(60.0)


def test_a_program_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shim, "command", lambda program: ["/nonexistent"])
    actor = ServerActor(NAME, RayPlan(shards=2, workers=1), "127.0.0.1")
    with pytest.raises(FileNotFoundError):
        actor.serve("127.0.0.1:7000")
    with pytest.raises(Unavailable, match="shard 1 cannot be started"):
        actor.address(60.0)


def test_a_worker_has_the_variables_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_RANK", "7")
    actor = WorkerActor(1)
    assert repr(actor) == "worker 1"
    assert actor.run(lambda add: int(os.environ["PS_RANK"]) + add, (10,), {"PS_RANK": "1"}) == 11


def test_a_worker_waits_for_servers_as_long_as_it_is_told_else_long_enough_for_another_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("PS_CONNECT_TIMEOUT", "PS_RECONNECT_TIMEOUT")
    monkeypatch.setenv(names[0], "30")
    # Set first, so that it is taken back: the actor has the process for itself.
    monkeypatch.setenv(names[1], "")
    monkeypatch.delenv(names[1])
    assert WorkerActor(1).run(lambda: [os.environ[name] for name in names], (), {}) == ["30", "600"]
    given = worker_environment(RayPlan(1, 1, reconnect_timeout_seconds=7.5), "127.0.0.1:7000", 0, "")
    assert WorkerActor(1).run(lambda: [os.environ[name] for name in names], (), given) == ["30", "7.5"]
