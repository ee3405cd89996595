"""Streams end when their caller could not open them again; those of others go on. Below 1 s of CPU."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from ps_protocol.cluster.view import Member, Role
from ps_protocol.errors import Unauthenticated, Unavailable
from ps_protocol.rpc.channel import open_channel
from ps_protocol.rpc.client_errors import translate
from ps_protocol.security import callers
from ps_protocol.security.certificates import CertificateFacts, facts_in
from ps_protocol.security.credentials import AUTHORIZATION, SESSION, bearer
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.session import SessionSigner
from ps_protocol.security.settings import SecuritySettings
from ps_protocol.security.tokens import parse_tokens
from ps_server.certs import Authority, KeyedCertificate
from ps_server.serving import grpc_server, open_streams
from ps_server.serving.authorization import Authorization
from tests.support.certificates import authority, made_folder, security_of, write_pair
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


def test_what_a_certificate_admitted_stays_while_the_connection_stands_and_a_new_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(open_streams, "LOOK_SECONDS", 0.02)
    folder = made_folder(tmp_path / "lab")
    server = security_of(folder, "coordinator", token_file=None)
    authorization = Authorization(server)
    services = [("test.Streaming", lambda server: server.add_generic_rpc_handlers((Streaming(),)))]
    with LoopThread() as loop:
        running = loop.run(grpc_server.start("127.0.0.1", 0, services, authorization=authorization))

        def opened(channel: grpc.Channel) -> Any:
            stream = channel.unary_stream(WATCH)(b"", timeout=60)
            assert next(stream) == b"begun"
            return stream

        with open_channel(running.address, security_of(folder, "admin", token_file=None)) as channel:
            stream = opened(channel)
            monkeypatch.setattr(callers, "now", lambda: time.time() + 86400 * 1000)
            opened(channel).cancel()
            looks = authorization.streams
            monkeypatch.setattr(looks, "check_all", counted := Counted(looks.check_all))
            wait_until(lambda: counted.calls > 2)
            assert next(stream) == b"begun"
            stream.cancel()
        with pytest.MonkeyPatch.context() as lenient:
            lenient.setattr(CertificateFacts, "check_time", lambda *_: None)
            pair, key = folder.pair("ca")
            expired = Authority(KeyedCertificate(pair.read_bytes(), key.read_bytes())).issue("admin/admin", (), -1.0)
            write_pair(folder.path, "admin", expired)
            late = security_of(folder, "admin", token_file=None)
        with open_channel(running.address, late) as channel, pytest.raises(grpc.RpcError) as caught:
            opened(channel)
        refused = translate(caught.value, "the server")
        assert isinstance(refused, Unavailable)
        assert f"the certificate in {folder.path}/admin.pem of this process has expired on 20" in refused.actual
        loop.run(running.stop(0))


class Counted:
    def __init__(self, call: Any) -> None:
        self.calls, self._call = 0, call

    def __call__(self) -> None:
        self.calls += 1
        self._call()


@pytest.mark.parametrize(("reused", "admitted"), [((b"false",), True), ((b"true",), False), ((), False)])
def test_an_expired_certificate_admits_no_connection_that_resumes_an_earlier_one(
    reused, admitted, tmp_path, monkeypatch
):
    class Context:
        def invocation_metadata(self) -> tuple[()]:
            return ()

        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

        def auth_context(self) -> dict[str, tuple[bytes, ...]]:
            return {"x509_pem_cert": (authority().issue("admin/a").certificate,), "ssl_session_reused": reused}

    server = Authorization(security_of(made_folder(tmp_path / "lab"), "coordinator", token_file=None))
    monkeypatch.setattr(callers, "now", lambda: time.time() + 86400 * 1000)
    if admitted:
        assert server._caller_of(Context()).roles == {AccessRole.ADMIN}
    else:
        with pytest.raises(Unauthenticated, match="has expired on"):
            server._caller_of(Context())


def test_a_certificate_is_valid_until_its_moment(monkeypatch):
    facts = facts_in(authority().issue("worker/w").certificate)
    monkeypatch.setattr(callers, "now", lambda: facts.not_after.timestamp())
    callers.check_expiry(facts)
    monkeypatch.setattr(callers, "now", lambda: facts.not_after.timestamp() + 1)
    with pytest.raises(Unauthenticated, match="has expired on 20"):
        callers.check_expiry(facts)
