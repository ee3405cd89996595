"""Shared memory without a name: its size is fixed, who may write it is too, and it ends with the last view of it."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.wire.shared_memory import KNOWN_SEGMENTS, KeptMappings, Recent, SharedMemory
from tests.support.descriptors import referring

SIZE = 3 * mmap.PAGESIZE + 5


def is_open(fd: int, kind: str = "memfd:torch-ps") -> bool:
    """Not where the number is that of another thread's file by now."""
    try:
        return kind in os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
    except OSError:
        return False


def handed_over(segment: SharedMemory) -> int:
    """The descriptor another process would get."""
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        socket.send_fds(one, [b"."], [segment.fd])
        return socket.recv_fds(other, 1, 1)[1][0]


def mapped(inode: int) -> int:
    """How often this segment is mapped: those of earlier tests may go meanwhile."""
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        return sum("memfd:torch-ps" in line and line.split()[4] == str(inode) for line in maps)


def test_a_new_segment_is_zero_and_both_ends_see_what_either_writes():
    ours = SharedMemory.create(SIZE)
    theirs = SharedMemory.attach(handed_over(ours), SIZE, writable=True)
    assert bytes(ours.bytes) == bytes(SIZE)
    assert len(ours.bytes) == len(theirs.bytes) == SIZE
    ours.bytes[0], theirs.bytes[-1] = 7, 9
    assert (theirs.bytes[0], ours.bytes[-1]) == (7, 9)


def test_what_is_mapped_to_be_read_cannot_be_written():
    ours = SharedMemory.create(SIZE)
    theirs = SharedMemory.attach(handed_over(ours), SIZE, writable=False)
    with pytest.raises(TypeError, match="read-only"):
        theirs.bytes[0] = 1


@pytest.mark.parametrize("promised", [SIZE + 1, 10 * SIZE, 1 << 62])
def test_a_segment_smaller_than_promised_is_refused_and_its_descriptor_closed(promised: int):
    ours = SharedMemory.create(SIZE)
    fd = handed_over(ours)
    with pytest.raises(ValueError, match="promised"):
        SharedMemory.attach(fd, promised, writable=True)
    assert not is_open(fd)


def test_a_larger_segment_shows_only_the_bytes_that_were_promised():
    ours = SharedMemory.create(SIZE)
    assert len(SharedMemory.attach(handed_over(ours), 11, writable=False).bytes) == 11


def test_what_cannot_be_mapped_is_refused_and_its_descriptor_closed():
    read_end, write_end = os.pipe()
    os.close(write_end)
    with pytest.raises((OSError, ValueError)):
        SharedMemory.attach(read_end, SIZE, writable=True)
    assert not is_open(read_end, "pipe:")


@pytest.mark.parametrize("size", [0, -1])
def test_no_segment_has_no_bytes(size: int):
    before = referring("memfd:torch-ps")
    with pytest.raises((OSError, ValueError)):
        SharedMemory.create(size)
    assert referring("memfd:torch-ps") <= before


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1, 0])
def test_nobody_changes_the_size_of_a_segment(size: int):
    ours = SharedMemory.create(SIZE)
    fd = handed_over(ours)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, size)
    os.close(fd)


def test_nobody_else_writes_a_sealed_segment_and_its_owner_goes_on():
    ours = SharedMemory.create(SIZE)
    ours.seal()
    if not fcntl.fcntl(ours.fd, fcntl.F_GET_SEALS) & 0x10:
        pytest.skip("this kernel has no F_SEAL_FUTURE_WRITE (Linux 5.1)")
    fd = handed_over(ours)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, SIZE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):  # opened again it is the same memory
        os.pwrite(again := os.open(f"/proc/self/fd/{fd}", os.O_RDWR), b"x", 0)
    os.close(again)
    theirs = SharedMemory.attach(fd, SIZE, writable=False)
    ours.bytes[4] = 44
    assert theirs.bytes[4] == 44


def test_a_writable_mapping_of_a_sealed_segment_is_refused_and_its_descriptor_closed():
    ours = SharedMemory.create(SIZE)
    ours.seal()
    fd = handed_over(ours)
    with pytest.raises(PermissionError):
        SharedMemory.attach(fd, SIZE, writable=True)
    assert not is_open(fd)


def test_sealing_twice_is_sealing():
    ours = SharedMemory.create(SIZE)
    ours.seal()
    ours.seal()
    ours.bytes[0] = 1


def test_a_mapping_lives_as_long_as_a_view_of_it():
    ours = SharedMemory.create(SIZE)
    fd, view = ours.fd, ours.bytes[5:9]
    inode = os.fstat(fd).st_ino
    view[0] = 3
    assert is_open(fd)
    del ours
    assert not is_open(fd)
    assert bytes(view) == b"\x03\x00\x00\x00"
    assert mapped(inode) == 1
    del view
    assert mapped(inode) == 0


def test_memory_stays_when_the_process_that_made_it_lets_go():
    ours = SharedMemory.create(SIZE)
    ours.bytes[:3] = b"abc"
    theirs = SharedMemory.attach(handed_over(ours), SIZE, writable=False)
    del ours
    assert bytes(theirs.bytes[:3]) == b"abc"


def test_segments_leave_no_descriptor_behind():
    gc.collect()
    before = referring("memfd:torch-ps")
    for _ in range(20):
        ours = SharedMemory.create(SIZE)
        theirs = SharedMemory.attach(handed_over(ours), SIZE, writable=True)
    del ours, theirs
    assert referring("memfd:torch-ps") <= before


def test_the_last_sixteen_are_known():
    recent: Recent[str] = Recent()
    for number in range(1, KNOWN_SEGMENTS + 2):
        recent.put(number, str(number))
    assert KNOWN_SEGMENTS == 16
    assert recent.get(1) is None
    assert recent.get(2) == "2"
    recent.put(99, "99")  # forgets 3, for 2 has just been used
    assert recent.get(3) is None
    assert recent.get(2) == "2"


@given(regions=st.lists(st.integers(0, 40), max_size=200))
def test_both_ends_forget_alike(regions: list[int]):
    """The shard looks by region and gives numbers, the worker looks by number: neither sends what the other has."""
    shard: Recent[int] = Recent()
    worker: Recent[int] = Recent()
    numbers = 0
    for region in regions:
        number = shard.find(lambda known, region=region: known == region)
        if number is None:
            numbers = number = numbers + 1
            shard.put(number, region)
            assert worker.get(number) is None
            worker.put(number, region)
        else:
            assert worker.get(number) == region


def allocated(segment: SharedMemory) -> int:
    """Bytes of memory that it takes."""
    return 512 * os.fstat(segment.fd).st_blocks


def test_address_space_that_is_reserved_takes_memory_when_it_is_touched_and_gives_it_back():
    ours = SharedMemory.create(SIZE, reserved_bytes=20 * SIZE)
    assert len(ours.bytes) == 20 * SIZE
    assert allocated(ours) <= 2 * SIZE
    ours.bytes[:SIZE] = b"x" * SIZE
    ours.touch(10 * SIZE)
    assert allocated(ours) >= 10 * SIZE
    ours.touch(5 * SIZE)
    assert bytes(ours.bytes[:SIZE]) == b"x" * SIZE
    ours.trim(SIZE)
    assert allocated(ours) <= 2 * SIZE
    assert bytes(ours.bytes[: 2 * SIZE]) == (b"x" * SIZE).ljust(2 * SIZE, b"\0")


def test_what_others_read_is_not_given_back():
    ours = SharedMemory.create(SIZE, reserved_bytes=20 * SIZE)
    ours.seal()
    ours.touch(10 * SIZE)
    ours.trim(SIZE)
    assert allocated(ours) >= 10 * SIZE


def test_a_mapping_that_was_kept_is_given_for_the_same_memory_and_the_same_use_once():
    ours = SharedMemory.create(SIZE, reserved_bytes=20 * SIZE)
    kept = KeptMappings()
    first = kept.map(handed_over(ours), SIZE, writable=True)
    kept.keep(first)
    other = kept.map(handed_over(SharedMemory.create(SIZE)), SIZE, writable=True)
    reading = kept.map(handed_over(ours), SIZE, writable=False)
    fd = handed_over(ours)
    again = kept.map(fd, 4 * SIZE, writable=True)
    assert again is first
    assert not is_open(fd)
    assert first not in (other, reading, kept.map(handed_over(ours), SIZE, writable=True))


def test_a_mapping_that_is_too_small_now_is_made_anew_and_what_is_cleared_is_forgotten():
    ours = SharedMemory.create(SIZE, reserved_bytes=4 * SIZE)
    kept = KeptMappings()
    small = SharedMemory.attach(handed_over(ours), SIZE, writable=True)
    kept.keep(small)
    large = kept.map(handed_over(ours), 4 * SIZE, writable=True)
    assert len(large.bytes) == 4 * SIZE
    kept.keep(large)
    kept.clear()
    assert kept.map(handed_over(ours), SIZE, writable=True) is not large
