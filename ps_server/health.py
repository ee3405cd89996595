"""The program ``python -m ps_server.health``: asks a server over gRPC whether it serves, for health checks.

It is called every few seconds for as long as a server lives, so it speaks the few bytes of a call itself and imports
nothing but the standard library: loading gRPC costs ten times what the question does. HTTP/2 is RFC 9113, the form
of its headers RFC 7541, the service https://github.com/grpc/grpc/blob/master/doc/health-checking.md.
"""

import os
import socket
import sys

USAGE = """Usage: python -m ps_server.health HOST:PORT [SERVICE]

Ask the server at HOST:PORT whether it serves. SERVICE is a full protobuf name; without it the whole server.

With PS_TLS_CA the server is asked over TLS; PS_TLS_CERT and PS_TLS_KEY are shown to one that requires a certificate.

Exit code 0 when it does, 1 with the reason when it does not."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY = 0, 1, 3, 4, 7
_END_STREAM, _END_HEADERS = 1, 4
#: An answer is some hundred bytes.
_LONGEST_FRAME = 1 << 16
_STATES = {0: "UNKNOWN", 1: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}


class NotServing(Exception):
    """The server does not serve, or nothing that answers like one is there; the text says what."""


def check(address: str, service: str = "", timeout_seconds: float = 3.0) -> None:
    """Return if the server at ``address`` reports that ``service`` (empty: the whole server) is serving.

    Raises NotServing if it reports another state, does not know the service, or does not answer in time.
    """
    host, _, port = address.rpartition(":")
    try:
        host, number = host.strip("[]"), int(port)
    except ValueError:
        raise NotServing(f"{address!r} is not host:port") from None
    try:
        with socket.create_connection((host, number), timeout=timeout_seconds) as plain, _secured(plain, host) as line:
            line.sendall(_request(address, service))
            state = _state(line)
    except OSError as error:
        raise NotServing(f"{address} does not answer: {error}") from None
    except EOFError:
        raise NotServing(f"{address} does not answer as a gRPC server") from None
    if state is None:
        raise NotServing(f"{address} has no service {service}" if service else f"{address} has no health service")
    if state != 1:
        raise NotServing(f"{address} is {_STATES.get(state, state)}")


def _secured(connection: socket.socket, host: str) -> socket.socket:
    """``connection`` with TLS, where the environment says so. Raises OSError, also of TLS and its files."""
    if not (authorities := os.environ.get("PS_TLS_CA")):
        return connection
    import ssl  # half as slow to import as all else here

    context = ssl.create_default_context(cafile=authorities)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    if certificate := os.environ.get("PS_TLS_CERT"):
        context.load_cert_chain(certificate, os.environ.get("PS_TLS_KEY"))
    return context.wrap_socket(connection, server_hostname=host)


def _request(address: str, service: str) -> bytes:
    name = service.encode()
    message = b"\x0a" + bytes([len(name)]) + name if name else b""
    if len(name) > 127:
        raise NotServing(f"no service has so long a name: {service[:40]}…")
    headers = (
        b"\x83\x86"  # :method POST, :scheme http
        + b"\x04" + _text("/grpc.health.v1.Health/Check")  # :path
        + b"\x01" + _text(address[:127])  # :authority
        + b"\x0f\x10" + _text("application/grpc")  # content-type
        + b"\x00" + _text("te") + _text("trailers")
    )  # fmt: skip
    body = b"\x00" + len(message).to_bytes(4, "big") + message
    return (
        _PREFACE
        + _frame(_SETTINGS, 0, 0, b"")
        + _frame(_HEADERS, _END_HEADERS, 1, headers)
        + _frame(_DATA, _END_STREAM, 1, body)
    )


def _text(text: str) -> bytes:
    data = text.encode()
    return bytes([len(data)]) + data


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _state(connection: socket.socket) -> int | None:
    """The state that the answer holds; None when the call was refused. Raises EOFError for what is no answer."""
    while True:
        head = _exactly(connection, 9)
        length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
        if length > _LONGEST_FRAME:
            raise EOFError
        payload = _exactly(connection, length)
        if kind == _DATA:
            message = payload[5:]
            return message[1] if len(message) == 2 and message[0] == 8 else 0
        if kind == _HEADERS and flags & _END_STREAM:
            return None
        if kind in (_RST_STREAM, _GOAWAY):
            raise EOFError


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            raise EOFError
        data += more
    return data


def main(arguments: list[str]) -> int:
    """The exit code of the program."""
    if len(arguments) not in (1, 2) or arguments[0].startswith("-"):
        asked = arguments == ["--help"]
        print(USAGE, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    try:
        check(arguments[0], arguments[1] if len(arguments) == 2 else "")
    except NotServing as error:
        print(f"Error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
