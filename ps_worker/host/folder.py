"""Where the workers of one host meet: a folder of their user, with a file of each worker and the lock of who leads."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import stat
import struct
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from ps_protocol.files import FOLDER_MODE, make_private_file, sweep
from ps_protocol.wire.shared_memory import boot_id
from ps_protocol.wire.unix_peer import check_peer
from ps_worker.host.core import may_come
from ps_worker.host.messages import MAX_BYTES, HostWorker, Position

_PREFIX = "torch-ps-hosts-"

_BUFFER_BYTES = MAX_BYTES + (64 << 10)

_SEND_SECONDS = 1

_NAME_BYTES = 96


class HostFolder:
    """The folder of one job on this host, as one worker process uses it. From any thread; closed by its session.

    Each worker has a file here that it locks, from before it joins the job: once the job has started, a worker finds
    all others of the host. Only processes of the same user come in, and those that see the same temporary files.
    """

    def __init__(self, job: str, base: Path | None = None) -> None:
        """``job``: the same for all its workers. Raises OSError."""
        above = (base or Path(tempfile.gettempdir())) / f"{_PREFIX}{os.geteuid()}"
        with suppress(FileExistsError):
            above.mkdir(FOLDER_MODE)
        _require_private(above)
        sweep(above.iterdir(), _remove)  # those of jobs of which no worker is left
        # Temporary files may be on a disk that several machines share.
        self.path, self._folder = _entered(above / _name(f"{job} {boot_id()}"))
        #: Sockets and locks of this process.
        self.descriptors = OwnDescriptors()
        self.descriptors.add(self._folder)
        try:
            self._own, self._file = _locked_file(self.path)
        except OSError:
            self.descriptors.close(self._folder)
            raise
        self.descriptors.add(self._file)
        self._worker = HostWorker(0, 0)
        #: Models of this worker, with those that it steps by itself: it may wait in a step of each.
        self.models = 0
        #: Of the leaders: one that is frozen keeps its lock, and the next one has another.
        self.number = self._newest()
        self._lead_lock = -1

    def name(self, worker: HostWorker) -> None:
        """Say that this process has joined the job as ``worker``."""
        self._worker = worker
        self.away((0, 0))

    def away(self, until: Position) -> None:
        """Say that this worker makes no push before ``until``, or makes it by itself."""
        said = f"{self._worker.rank} {self._worker.incarnation} {until[0]} {until[1]}".encode()
        # In one write: it is read without a lock.
        os.pwrite(self._file, said.ljust(_NAME_BYTES), 0)

    def others(self, position: Position, reached: Position) -> set[HostWorker]:
        """The others that have a file here, and may make the push at ``position`` with others; they may have ended.

        ``reached``: as in ``Lead``.
        """
        found = set()
        for path in self._files():
            with suppress(OSError, ValueError):
                rank, incarnation, phase, clock = map(int, path.read_text().split())
                if (phase, clock) <= position and may_come((phase, clock), reached):
                    found.add(HostWorker(rank, incarnation))
        return found

    def has_nameless(self) -> bool:
        """Whether a process that has a file here is about to join the job."""
        for path in self._files():
            with suppress(OSError):
                if not path.read_text().strip():
                    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    try:
                        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    except BlockingIOError:
                        return True
                    finally:
                        os.close(file)
        return False

    def _files(self) -> list[Path]:
        return [path for path in self.path.glob("*.worker") if path != self._own]

    # -- who leads

    def lead(self, worker: HostWorker, revision: int) -> bool:
        """Whether this process leads, from now on if nobody else does. Raises OSError.

        ``revision``: of a membership that includes ``worker``, which it is.
        """
        if self._lead_lock >= 0:
            return True
        self.number = max(self.number, self._newest())
        lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        try:
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{worker.rank} {worker.incarnation} {revision}".encode(), 0)
        except OSError:
            os.close(lock)  # another one may lead
            raise
        self._lead_lock = lock
        self.descriptors.add(lock)
        return True

    def holder(self) -> tuple[HostWorker, int] | None:
        """Who leads, and a revision of a membership with it; None: nobody, or it cannot be read yet."""
        try:
            rank, incarnation, revision = map(int, self._lock_path.read_text().split())
        except (OSError, ValueError):
            return None
        return HostWorker(rank, incarnation), revision

    def pass_over(self) -> None:
        """Who leads is no member any more, and its lock is not waited for: there is another one from now on."""
        self.number += 1

    def end_model(self) -> None:
        """A model of this worker has ended; without any, another process may lead."""
        self.models -= 1
        if not self.models:
            self.resign()

    def resign(self) -> None:
        """Another process may lead."""
        if self._lead_lock >= 0:
            os.ftruncate(self._lead_lock, 0)
            self.descriptors.close(self._lead_lock)
            self._lead_lock = -1

    def listen(self, model: str) -> socket.socket:
        """Be found by the followers of ``model``: the listening socket. Raises OSError."""
        address = self._address(model)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            address.unlink(missing_ok=True)
            listener.bind(str(address))
            listener.listen(128)
        except OSError:
            listener.close()
            raise
        self.descriptors.add(listener)
        return listener

    def end_listening(self, model: str, listener: socket.socket) -> None:
        """Be found no more."""
        self._address(model).unlink(missing_ok=True)
        self.descriptors.close(listener)

    def connect(self, model: str) -> socket.socket:
        """A connection to the leader of ``model``. Raises OSError, PermissionDenied where it is of another user."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            prepare(sock)
            sock.connect(str(self._address(model)))
            check_peer(sock, None)
        except BaseException:
            sock.close()
            raise
        self.descriptors.add(sock)
        return sock

    @property
    def _lock_path(self) -> Path:
        return self.path / f"{self.number}.leader"

    def _newest(self) -> int:
        numbers = [path.stem for path in self.path.glob("*.leader")]
        return max(map(int, filter(str.isdecimal, numbers)), default=0)

    def _address(self, model: str) -> Path:
        return self.path / f"{self.number}-{_name(model)}.s"

    def close(self) -> None:
        """Leave; the last one removes the folder."""
        self.resign()
        self._own.unlink(missing_ok=True)
        self.descriptors.close(self._file)
        with suppress(OSError):
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(self.path)
        self.descriptors.close(self._folder)


def _name(model: str) -> str:
    return hashlib.blake2b(model.encode(), digest_size=6).hexdigest()


class OwnDescriptors:
    """What a forked child must not keep: sockets would stay open, and locks held, when this process has ended."""

    def __init__(self) -> None:
        #: A number is that of a file: one that has been closed elsewhere may be another file's by now.
        self._held: dict[int | socket.socket, os.stat_result | None] = {}
        held = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close_all(held()))

    def add(self, descriptor: int | socket.socket) -> None:
        """Close it in children that are forked from now on."""
        self._held[descriptor] = os.fstat(descriptor) if isinstance(descriptor, int) else None

    def close(self, descriptor: int | socket.socket) -> None:
        """Close it here. The other end of a socket is told, also where a child has it: one that was forked before
        ``add`` keeps it.
        """
        self._held.pop(descriptor, None)
        if not isinstance(descriptor, int):
            with suppress(OSError):
                descriptor.shutdown(socket.SHUT_RDWR)
        _close(descriptor)

    def close_all(self) -> None:
        """Close all, in a child."""
        for descriptor, file in self._held.items():
            with suppress(OSError):
                if file is None or (isinstance(descriptor, int) and os.path.samestat(os.fstat(descriptor), file)):
                    _close(descriptor)
        self._held.clear()


def _close(descriptor: int | socket.socket) -> None:
    with suppress(OSError):
        if isinstance(descriptor, int):
            os.close(descriptor)
        else:
            descriptor.close()


def _close_all(descriptors: OwnDescriptors | None) -> None:
    if descriptors is not None:
        descriptors.close_all()


def prepare(sock: socket.socket) -> None:
    """Let ``sock`` take packets of any length that is sent, and give up an end that takes none."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_SECONDS, 0))


def _require_private(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path} is not a folder of this user alone")


def _entered(path: Path) -> tuple[Path, int]:
    """``path``, made where it is missing, and a shared lock on it."""
    while True:
        with suppress(FileExistsError):
            path.mkdir(FOLDER_MODE)
        with suppress(FileNotFoundError):
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            fcntl.flock(folder, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(folder)):
                    return path, folder
            os.close(folder)  # the last of its workers has removed it


def _locked_file(folder: Path) -> tuple[Path, int]:
    number = 0
    while True:
        path = folder / f"{os.getpid()}-{number}.worker"
        make_private_file(path)
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(path.stat(), os.fstat(file)):
                # The space that the name and positions take: a disk may be full.
                os.pwrite(file, b" " * _NAME_BYTES, 0)
                return path, file
        except (BlockingIOError, FileNotFoundError):
            number += 1
        except OSError:
            path.unlink(missing_ok=True)
            os.close(file)
            raise
        os.close(file)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
