"""A side channel under TLS 1.3: the records are made and read in memory, the socket carries them as any other bytes.

Two threads may use one TLS state only in turn, and neither may wait for the network meanwhile. So the socket is not
wrapped: each side encrypts a chunk under a lock and sends it without.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ps_protocol import times
from ps_protocol.errors import InvalidRequest, PsError, Unauthenticated
from ps_protocol.wire.carrier import PlainCarrier
from ps_protocol.wire.socket_messages import LENGTH, checked_length, patiently


def refusal(error: ssl.SSLError, peer: str) -> PsError | None:
    """The typed error for a failure of certificates; None: it is another failure."""
    reason = reason_of(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return Unauthenticated(
            f"the certificate of {peer} is not accepted",
            expected="a valid certificate of the authority in --tls-ca (PS_TLS_CA), for the address that is dialled",
            actual=error.verify_message,
            remedy="renew the certificate, or correct --tls-ca",
        )
    if "DID_NOT_RETURN_A_CERTIFICATE" in reason:
        return Unauthenticated(
            f"{peer} shows no certificate, and this side requires one",
            remedy="give it --tls-cert and --tls-key (PS_TLS_CERT, PS_TLS_KEY)",
        )
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return Unauthenticated(
            f"{peer} does not accept this side's certificate",
            actual=reason,
            remedy="see --tls-cert (PS_TLS_CERT) here and --tls-ca there",
        )
    return None


def broken(error: ssl.SSLError) -> ConnectionAbortedError:
    """A connection that was under TLS cannot go on."""
    return ConnectionAbortedError(f"the TLS connection broke: {reason_of(error)}")


def reason_of(error: ssl.SSLError) -> str:
    """The text of OpenSSL."""
    return error.reason or str(error)


CHUNK_BYTES = 256 << 10
"""Encrypted at a time, and received at a time: fits a core's cache."""

RECORD_BYTES = 16 << 10
"""The most bytes of one TLS record."""

_HANDSHAKE_RECORD = b"\x16"


class TlsCarrier:
    """A ``Carrier`` (see there) whose bytes only the peer can read. Useful once ``handshake`` has returned True."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, peer: str, *, host: str | None = None) -> None:
        """``peer``: for messages. ``host``: what the server's certificate is for; None: this side is the server."""
        self.socket = sock
        self._peer = peer
        self._serves = host is None
        self._began = False
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, self._serves, host)
        # typeshed knows only the call that returns bytes.
        self._read: Callable[[int, memoryview], int] = self._tls.read  # type: ignore[assignment]
        #: Over the TLS state, in which reading and writing share memory.
        self._lock = threading.Lock()
        self._buffer = memoryview(bytearray(CHUNK_BYTES))
        #: Records that the socket has not taken. Of the thread that sends.
        self._unsent = memoryview(b"")
        self._plain = PlainCarrier(sock)
        #: Messages are received in parts, by callers that go on until nothing is left.
        self.ahead = memoryview(b"")

    @property
    def plain(self) -> PlainCarrier:
        """The same socket without TLS: to answer a peer that speaks none."""
        return self._plain

    # -- the handshake

    def handshake(self) -> bool:
        """Go on with the handshake as far as it goes without waiting; whether it is complete.

        Raises Unauthenticated when one side does not accept the other, or the peer speaks no TLS; ConnectionError.
        """
        try:
            if not self._began and self._serves and not self._speaks_tls():
                return False
            self._began = True
            while not self._step():
                got = self.socket.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
                if got == 0:
                    raise ConnectionResetError(f"{self._peer} closed the connection in the handshake")
                self._incoming.write(self._buffer[:got])
        except BlockingIOError:
            return False
        return True

    def wait_for_handshake(self, seconds: float) -> None:
        """The whole handshake, on a thread that may wait so long in all. Raises as ``handshake``."""
        deadline = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        while not self.handshake():
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise ConnectionAbortedError(f"{self._peer} did not complete the TLS handshake in {seconds:g} s")

    def _speaks_tls(self) -> bool:
        """False: nothing has come yet. Raises Unauthenticated for a peer whose first byte begins no handshake."""
        first = self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        if not first:
            raise ConnectionResetError(f"{self._peer} closed the connection before the handshake")
        if first != _HANDSHAKE_RECORD:
            raise Unauthenticated(
                "this side channel is under TLS, and the peer speaks in clear",
                expected="a TLS 1.3 handshake",
                actual=f"a first byte of {first[0]:#04x}",
                remedy="give the peer the same --tls-ca (PS_TLS_CA) as this shard",
            )
        return True

    def _step(self) -> bool:
        """Whether the handshake is complete, and its last message is sent."""
        done = True
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            done = False
        except ssl.SSLError as error:
            self._flush_now()  # the alert, which tells the peer why
            raise refusal(error, self._peer) or Unauthenticated(
                f"the TLS handshake with {self._peer} failed",
                expected="TLS 1.3",
                actual=reason_of(error),
                remedy="see that both sides have a certificate of the same authority (--tls-ca, PS_TLS_CA)",
            ) from error
        self._flush_now()
        if len(self._unsent):
            raise ConnectionAbortedError(f"{self._peer} takes no bytes of the handshake")
        return done

    # -- as a carrier

    def prepare(self, stall_seconds: float = times.PATIENCE_SECONDS) -> None:
        """See Carrier."""
        self._plain.prepare(stall_seconds)

    def fileno(self) -> int:
        """See Carrier."""
        return self.socket.fileno()

    def keep_blocking(self) -> None:
        """See Carrier."""
        self.socket.setblocking(True)

    def receive_now(self, view: memoryview) -> int:
        """See Carrier."""
        while True:
            got = self._decrypted(view)
            if got is not None:
                return got
            if not self._take(self.socket.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)):
                return 0

    def message_now(self, most_bytes: int) -> bytes | None:
        """See Carrier; messages are received in parts."""
        return None

    def receive_message(self, alive: Callable[[], bool]) -> tuple[bytes | bytearray, list[int] | None]:
        """See Carrier; no descriptors come under TLS."""
        message = bytearray(self._receive_head(alive))
        self.receive_into([memoryview(message)])
        return message, []

    def _receive_head(self, alive: Callable[[], bool]) -> int:
        head = memoryview(bytearray(LENGTH.size))
        at = 0
        while at < len(head):
            got = self._decrypted(head[at:])
            if got is None:
                try:
                    got = -1 if self._take(self.socket.recv_into(self._buffer)) else 0
                except BlockingIOError as error:
                    if not alive():
                        raise ConnectionAbortedError("the peer is gone") from error
                    continue
            if got == 0:
                raise ConnectionResetError("the peer closed the connection")
            at += max(0, got)
        return checked_length(bytes(head))

    def receive_into(self, pieces: Sequence[memoryview]) -> None:
        """See Carrier."""
        receive = partial(self.socket.recv_into, self._buffer)
        for piece in pieces:
            at = 0
            while at < len(piece):
                got = self._decrypted(piece[at:])
                if got is None and self._take(patiently(self.socket, select.POLLIN, receive)):
                    continue
                if not got:
                    raise ConnectionResetError("the peer closed the connection in the middle of a transfer")
                at += got

    def send_all(self, pieces: Sequence[memoryview | bytes], descriptors: Sequence[int] = ()) -> None:
        """See Carrier. Raises InvalidRequest for descriptors: a TCP socket carries none."""
        _refuse(descriptors)
        self._flush()
        for chunk in _chunks(pieces):
            self._encrypt(chunk)
            self._flush()

    def send_now(
        self, pieces: Sequence[memoryview | bytes], descriptors: Sequence[int] = ()
    ) -> list[memoryview | bytes]:
        """See Carrier. What was encrypted and not taken by the socket is sent first by the next call.

        Raises InvalidRequest for descriptors.
        """
        _refuse(descriptors)
        chunks = _chunks(pieces)
        while not len(self._unsent) and (chunk := next(chunks, None)) is not None:
            self._encrypt(chunk)
            self._flush_now()
        rest: list[memoryview | bytes] = list(chunks)
        return rest or ([b""] if len(self._unsent) else [])

    def shut_down(self) -> None:
        """See Carrier."""
        self._plain.shut_down()

    def close(self) -> None:
        """See Carrier."""
        self._plain.close()

    # -- records

    def _take(self, got: int) -> bool:
        """``got`` bytes of records have come into the buffer; False at the end of the connection."""
        self._incoming.write(self._buffer[:got])
        return got > 0

    def _decrypted(self, view: memoryview) -> int | None:
        """Bytes written to ``view``; None where a record is not whole yet, 0 where the peer has closed."""
        at = 0
        with self._lock:
            if not self._incoming.pending and not self._tls.pending():
                return None
            try:
                while at < len(view):
                    got = self._read(len(view) - at, view[at:])
                    if got == 0:
                        break
                    at += got
            except ssl.SSLWantReadError:
                return at or None
            except ssl.SSLError as error:
                raise refusal(error, self._peer) or broken(error) from error
        return at

    def _encrypt(self, chunk: memoryview) -> None:
        with self._lock:
            try:
                while len(chunk):
                    chunk = chunk[self._tls.write(chunk[:RECORD_BYTES]) :]
            except ssl.SSLError as error:
                raise broken(error) from error

    def _records(self) -> memoryview:
        """What is to be sent: what the socket did not take, else the newest."""
        if not len(self._unsent):
            with self._lock:
                self._unsent = memoryview(self._outgoing.read())
        return self._unsent

    def _flush(self) -> None:
        while len(records := self._records()):
            self._unsent = records[patiently(self.socket, select.POLLOUT, partial(self.socket.send, records)) :]

    def _flush_now(self) -> None:
        try:
            while len(records := self._records()):
                self._unsent = records[self.socket.send(records, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            pass


def _refuse(descriptors: Sequence[int]) -> None:
    if descriptors:
        raise InvalidRequest("descriptors do not go over TLS", actual=str(len(descriptors)))


def _chunks(pieces: Sequence[memoryview | bytes]) -> Iterator[memoryview]:
    """``pieces`` end to end, in chunks; only those that a large piece does not fill alone are copied."""
    gathered: list[memoryview] = []
    size = 0
    for piece in pieces:
        view = memoryview(piece)
        while len(view):
            part = view[: CHUNK_BYTES - size]
            gathered.append(part)
            size, view = size + len(part), view[len(part) :]
            if size == CHUNK_BYTES:
                yield _joined(gathered)
                gathered, size = [], 0
    if gathered:
        yield _joined(gathered)


def _joined(parts: Sequence[memoryview]) -> memoryview:
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
