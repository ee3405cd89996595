"""Streams end when their caller could not open them again; those of others go on. Below 1 s of CPU."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from ps_protocol.cluster.view import Member, Role
from ps_protocol.errors import Unauthenticated, Unavailable
from ps_protocol.rpc.channel import open_channel
from ps_protocol.rpc.client_errors import translate
from ps_protocol.security import callers
from ps_protocol.security.credentials import AUTHORIZATION, SESSION, bearer
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.session import SessionSigner
from ps_protocol.security.settings import SecuritySettings
from ps_protocol.security.tokens import parse_tokens
from ps_server.serving import grpc_server, open_streams
from ps_server.serving.authorization import Authorization
from tests.support.loops import LoopThread
from tests.support.shards import wait_until

SECRETS = {name: f"{name}-secret-0123456789" for name in ("ann", "bob")}
FEED, WATCH = "/ps_protocol.v1.Shard/Feed", "/ps_protocol.v1.Coordinator/Watch"
RESHARD = "/ps_protocol.v1.Coordinator/Reshard"


class Streaming(grpc.GenericRpcHandler):
    """A stream that writes whatever happens, one that yields, and one that yields once and waits."""

    def __init__(self) -> None:
        self.cancelled = 0

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        async def writes(_: bytes, context: Any) -> None:
            await context.write(b"begun")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise

        async def yields(_: bytes, context: Any) -> AsyncIterator[bytes]:
            while True:
                yield b"begun"
                await asyncio.sleep(0.01)

        async def waits(_: bytes, context: Any) -> AsyncIterator[bytes]:
            yield b"begun"
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1

        return grpc.unary_stream_rpc_method_handler({FEED: writes, WATCH: yields, RESHARD: waits}[details.method])


@pytest.mark.parametrize("shows", ["token", "session"])
@pytest.mark.parametrize("method", [FEED, WATCH, RESHARD])
def test_a_stream_ends_when_its_token_is_removed_and_those_of_others_go_on(method, shows, tmp_path, monkeypatch):
    """Also one that shows the session alone that was made with the token."""
    monkeypatch.setattr(open_streams, "LOOK_SECONDS", 0.02)
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)

    def allow(*names: str) -> None:
        partial = tmp_path / "part"
        partial.touch(0o600)
        partial.write_text("".join(f"admin:{name}:{SECRETS[name]}\n" for name in names))
        partial.replace(tokens)

    allow("ann", "bob")
    security = Security(SecuritySettings(token_file=tokens), AccessRole.SERVER)
    handler, signer, authorization = Streaming(), SessionSigner(), Authorization(security)
    authorization.trust(signer.public_key)
    services = [("test.Streaming", lambda server: server.add_generic_rpc_handlers((handler,)))]
    with LoopThread() as loop:
        start = grpc_server.start("127.0.0.1", 0, services, authorization=authorization)
        running = loop.run(start)
        with open_channel(running.address) as channel:

            def opened(name: str) -> Any:
                token = parse_tokens(f"admin:{name}:{SECRETS[name]}", "here")[0]
                session = signer.sign(Member(Role.EVALUATOR, 0, 1), frozenset({AccessRole.ADMIN}), token.digest)
                shown = (SESSION, session) if shows == "session" else (AUTHORIZATION, bearer(token.secret))
                stream = channel.unary_stream(method)(b"", metadata=(shown,))
                assert next(stream) == b"begun"
                return stream

            ann, bob = opened("ann"), opened("bob")
            allow("bob")
            with pytest.raises(grpc.RpcError) as caught:
                for _ in ann:
                    pass
            error = translate(caught.value, "the server")
            assert isinstance(error, Unavailable)
            assert "the token of the caller was removed" in error.message
            assert bob.is_active()
            if method != WATCH:
                wait_until(lambda: handler.cancelled == 1)
            with pytest.raises(grpc.RpcError) as caught:
                opened("ann")
            refused = translate(caught.value, "the server")
            assert isinstance(refused, Unavailable if shows == "session" else Unauthenticated)
            bob.cancel()
        loop.run(running.stop(0))


def test_a_certificate_is_valid_until_its_moment(monkeypatch):
    monkeypatch.setattr(callers, "now", lambda: 1000.0)
    callers.check_expiry(1000.0)
    with pytest.raises(Unauthenticated, match=r"has expired on 1970-01-01 00:16:39 UTC"):
        callers.check_expiry(999.0)
