"""Where the workers of one host meet: who is there, who leads, and what is left of those that have ended."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ps_worker.host.folder import HostFolder
from ps_worker.host.messages import FOREVER, HostWorker
from tests.support.shards import wait_until

ONE, TWO = HostWorker(1, 11), HostWorker(2, 12)


@pytest.fixture
def enter(short_path):
    entered = []

    def enter(job: str = "a:1") -> HostFolder:
        entered.append(HostFolder(job, short_path))
        return entered[-1]

    yield enter
    for folder in entered:
        if folder.path.exists():
            folder.close()


def test_workers_of_one_job_find_each_other_once_they_have_joined_it(enter):
    one, two, other = enter(), enter(), enter("b:1")
    assert one.has_nameless()
    assert one.others((0, 1), (9, 9)) == set()
    two.name(TWO)
    other.name(ONE)
    assert not one.has_nameless()
    assert one.others((0, 1), (9, 9)) == {TWO}
    assert other.others((0, 1), (9, 9)) == set()


def test_a_worker_that_pushes_by_itself_up_to_a_step_is_not_among_those_who_make_it(enter):
    one, two = enter(), enter()
    two.name(TWO)
    two.away((0, 3))
    assert one.others((0, 2), (9, 9)) == set()
    assert one.others((0, 3), (0, 1)) == set(), "its second push may wait for that of the leader"
    assert one.others((0, 3), (0, 2)) == {TWO}
    two.away(FOREVER)
    assert one.others((9, 9), (9, 9)) == set()


def test_one_process_leads_until_it_resigns_and_is_named(enter):
    one, two = enter(), enter()
    assert one.lead(ONE, 5)
    assert one.lead(ONE, 6)
    assert not two.lead(TWO, 6)
    assert two.holder() == (ONE, 5)
    one.resign()
    assert two.holder() is None
    assert two.lead(TWO, 7)


def test_a_leader_that_keeps_its_lock_is_passed_over_and_newcomers_find_the_next_one(enter):
    frozen, two = enter(), enter()
    assert frozen.lead(ONE, 5)
    assert not two.lead(TWO, 6)
    two.pass_over()
    assert two.lead(TWO, 6)
    newcomer = enter()
    assert not newcomer.lead(HostWorker(3, 13), 7)
    assert newcomer.holder() == (TWO, 6)


def test_followers_connect_to_who_listens_and_a_socket_of_a_dead_leader_is_replaced(enter):
    one, two = enter(), enter()
    with pytest.raises(OSError, match="No such file"):
        two.connect("model")
    dead = one.listen("model")
    dead.close()
    with pytest.raises(ConnectionRefusedError):
        two.connect("model")
    listener = one.listen("model")
    sock = two.connect("model")
    one.descriptors.close(sock)
    one.end_listening("model", listener)
    with pytest.raises(OSError, match="No such file"):
        two.connect("model")


def test_a_forked_child_keeps_neither_the_lock_nor_a_socket(enter):
    one, two = enter(), enter()
    assert one.lead(ONE, 5)
    ours, theirs = socket.socketpair()
    one.descriptors.add(ours)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.read(reader, 1)
        os._exit(0)
    try:
        one.descriptors.close(ours)
        one.resign()
        assert theirs.recv(1) == b""
        wait_until(lambda: two.lead(TWO, 6))  # the child closes one after the other
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
        theirs.close()


def test_a_child_that_was_forked_before_a_socket_was_known_does_not_keep_its_other_end_waiting(enter):
    one = enter()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kept = os.dup(ours.fileno())  # as such a child has it
    try:
        one.descriptors.add(ours)
        ours.send(b"last")
        one.descriptors.close(ours)
        theirs.settimeout(10)
        assert theirs.recv(8) == b"last"
        assert theirs.recv(8) == b""
    finally:
        os.close(kept)
        theirs.close()


def test_the_last_worker_removes_the_folder_and_one_of_a_dead_job_is_removed_by_the_next(enter, short_path):
    one, two = enter(), enter()
    one.close()
    assert two.path.exists()
    two.close()
    assert not two.path.exists()
    dead = two.path.parent / "0123456789ab"
    dead.mkdir(0o700)
    enter()
    assert not dead.exists()


def test_machines_whose_temporary_files_are_on_one_disk_do_not_meet(enter, monkeypatch):
    here = enter()
    monkeypatch.setattr("ps_worker.host.folder.boot_id", lambda: "another machine")
    there = enter()
    there.name(TWO)
    assert here.others((9, 9), (9, 9)) == set()
    assert there.lead(TWO, 5)
    assert here.lead(ONE, 5)


@contextmanager
def full_disk() -> Iterator[None]:
    """Files may be made and take no byte."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_on_a_full_disk_no_worker_comes_in_and_nobody_waits_for_it(enter):
    one = enter()
    with full_disk(), pytest.raises(OSError, match="too large"):
        enter()
    assert not one.has_nameless()
    assert one.others((9, 9), (9, 9)) == set()


def test_a_worker_that_cannot_say_that_it_leads_leaves_that_to_another(enter):
    one, two = enter(), enter()
    with full_disk(), pytest.raises(OSError, match="too large"):
        one.lead(ONE, 5)
    assert two.lead(TWO, 5)


def test_a_folder_that_others_can_enter_is_not_used(enter, short_path):
    enter().close()
    (above,) = short_path.iterdir()
    above.chmod(0o755)
    with pytest.raises(PermissionError, match="not a folder of this user alone"):
        enter()
    above.chmod(0o700)


def test_a_forked_child_closes_no_file_that_has_the_number_of_one_closed_elsewhere(enter):
    folder = enter()
    reader, writer = os.pipe()
    number = os.open(folder.path, os.O_RDONLY)
    folder.descriptors.add(number)
    os.dup2(writer, number)  # at once: other threads open files, too
    child = os.fork()
    if not child:
        os.write(number, b"x")
        os._exit(0)
    os.waitpid(child, 0)
    os.close(number)
    os.close(writer)
    assert os.read(reader, 1) == b"x"
    os.close(reader)
