"""Owns a TCP proxy between two roles that can be silent, or cut, and heal."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

_CONNECT_SECONDS = 5.0


class Proxy:
    """Forwards connections to ``target`` (host:port). Used by one thread; pumps in threads of its own."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        #: host:port to dial instead of the target.
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._changed = threading.Condition()
        self._silent = self._apart = False
        self._sockets: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def hush(self) -> None:
        """From now on not a byte passes, and nobody is told."""
        self._become(silent=True, apart=False)

    def cut(self) -> None:
        """End every connection, and each new one at once."""
        self._become(silent=False, apart=True)
        self._end_all()

    def heal(self) -> None:
        """Forward again."""
        self._become(silent=False, apart=False)

    def close(self) -> None:
        """End everything."""
        self.cut()
        # Closing alone would leave the accepting thread waiting for ever.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _become(self, *, silent: bool, apart: bool) -> None:
        with self._changed:
            self._silent, self._apart = silent, apart
            self._changed.notify_all()

    def _end_all(self) -> None:
        with self._changed:
            sockets, self._sockets = self._sockets, set()
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, _CONNECT_SECONDS)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            with self._changed:
                self._sockets |= {near, far}
                apart = self._apart
            if apart:
                self._end_all()
                continue
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                with self._changed:
                    self._changed.wait_for(lambda: not self._silent)
                sink.sendall(data)
        except OSError:
            pass
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
