"""Memory of versions is used again when nobody reads it any more, in this process or another, and never before."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from ps_protocol.weights.memory import Room, VersionMemory
from ps_protocol.wire import shared_memory
from ps_protocol.wire.shared_memory import SharedMemory, can_tell_lent, map_private

SIZE = 100_000


@pytest.fixture
def memory() -> VersionMemory:
    return VersionMemory(shared=True)


@pytest.fixture
def _silent_system(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It says of no memory that nobody has it open."""

    def refused(*_: object) -> bool:
        return True

    can_tell_lent.cache_clear()
    monkeypatch.setattr(shared_memory, "_is_open_elsewhere", refused)
    yield
    can_tell_lent.cache_clear()


def segment_of(room: Room) -> SharedMemory:
    assert room.segment is not None
    return room.segment


def place_of(room: Room) -> int:
    return int(room.data.ctypes.data)


@pytest.mark.parametrize("shared", [False, True])
def test_memory_of_a_version_is_used_again_once_nobody_refers_to_any_part_of_it(shared: bool) -> None:
    memory = VersionMemory(shared=shared)
    room = memory.take(SIZE)
    room.data[:] = 7
    address, part = place_of(room), memoryview(room.data)[10:20]
    view = np.frombuffer(part, np.uint8)[2:]
    del room, part
    assert place_of(memory.take(SIZE)) != address
    assert view.tobytes() == b"\7" * 8
    del view
    again = memory.take(SIZE)
    assert place_of(again) == address
    assert memory.take(2 * SIZE).data.size == 2 * SIZE


@pytest.mark.parametrize("end", ["unmapped", "killed"])
def test_memory_that_another_process_maps_is_used_again_when_it_does_not_any_more(
    memory: VersionMemory, end: str
) -> None:
    room = memory.take(SIZE)
    room.data[:] = 7
    address, descriptor = place_of(room), segment_of(room).lend()
    theirs, ours = socket.socketpair()
    if (child := os.fork()) == 0:
        # It closes the descriptor, and has the mapping alone.
        mapped = map_private(descriptor, SIZE)
        theirs.send(b"x")
        theirs.recv(1)
        os._exit(0 if bytes(mapped) == b"\7" * SIZE else 1)
    os.close(descriptor)
    assert ours.recv(1) == b"x"
    del room
    for value in range(3):
        other = memory.take(SIZE)
        assert place_of(other) != address
        other.data[:] = value
    del other
    if end == "killed":
        os.kill(child, signal.SIGKILL)
    else:
        ours.send(b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (-signal.SIGKILL if end == "killed" else 0)
    ours.close()
    theirs.close()
    # Both that are spare are free now, and the newest comes first.
    assert address in taken(memory, 2)


def taken(memory: VersionMemory, count: int) -> set[int]:
    rooms = [memory.take(SIZE) for _ in range(count)]
    return {place_of(room) for room in rooms}


def test_a_descriptor_on_its_way_counts_as_lent(memory: VersionMemory) -> None:
    segment = segment_of(memory.take(SIZE))
    theirs, ours = socket.socketpair()
    with theirs, ours:
        assert not segment.is_lent
        descriptor = segment.lend()
        socket.send_fds(ours, [b"x"], [descriptor])
        os.close(descriptor)
        assert segment.is_lent
        _, received, _, _ = socket.recv_fds(theirs, 1, 1)
        assert segment.is_lent
        os.close(received[0])
        assert not segment.is_lent


def test_a_sealed_segment_is_lent_to_be_read_alone_and_can_be_used_again(memory: VersionMemory) -> None:
    room = memory.take(SIZE)
    segment, address = segment_of(room), place_of(room)
    segment.seal()
    descriptor = segment.lend()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(descriptor, b"x")
    mapped = map_private(descriptor, SIZE)
    mapped[0] = 9
    assert room.data[0] == 0
    assert segment.is_lent
    del mapped
    assert not segment.is_lent
    del room
    again = memory.take(SIZE)
    assert place_of(again) == address
    again.data[:] = 1


@pytest.mark.usefixtures("_silent_system")
def test_where_the_system_does_not_tell_memory_that_was_lent_is_not_used_again(memory: VersionMemory) -> None:
    first, second = memory.take(SIZE), memory.take(SIZE)
    lent, own = place_of(first), place_of(second)
    os.close(segment_of(first).lend())
    assert segment_of(first).is_lent
    del first, second
    rooms = [memory.take(SIZE) for _ in range(4)]
    assert own in {place_of(room) for room in rooms}
    assert lent not in {place_of(room) for room in rooms}


def test_what_is_spare_is_one_room_and_one_that_is_lent(memory: VersionMemory) -> None:
    before = segments()
    rooms = [memory.take(SIZE) for _ in range(6)]
    descriptors = [segment_of(room).lend() for room in rooms[:3]]
    assert segments() == before + 6
    del rooms[3:]
    assert segments() == before + 4
    for descriptor in descriptors[1:]:
        os.close(descriptor)
    while rooms:
        del rooms[0]
    assert segments() == before + 2
    os.close(descriptors[0])
    memory.take(SIZE)
    assert segments() == before + 1


def segments() -> int:
    """Of shared memory, that this process has open."""
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            if "memfd:torch-ps" in str(each.readlink()):
                found.add(each.stat().st_ino)
    return len(found)


@pytest.mark.parametrize("shared", [False, True])
def test_no_two_threads_have_the_same_memory(shared: bool) -> None:
    memory, wrong = VersionMemory(shared=shared), []
    before = sys.getswitchinterval()

    def use(mark: int) -> None:
        for _ in range(300):
            room = memory.take(4096)
            room.data[:] = mark
            for _ in range(5):
                if not (room.data == mark).all():
                    wrong.append(mark)

    try:
        sys.setswitchinterval(1e-5)
        threads = [threading.Thread(target=use, args=(mark,)) for mark in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong


def test_without_room_for_shared_memory_a_version_is_in_memory_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> SharedMemory:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SharedMemory, "create", full)
    room = VersionMemory(shared=True).take(SIZE)
    assert room.segment is None
    assert room.data.size == SIZE
    assert VersionMemory(shared=True).take(0).data.size == 0
