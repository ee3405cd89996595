"""A channel with certificates: new calls use new files, calls in progress go on, old certificates are refused."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ps_protocol.errors import PsError, Unauthenticated
from ps_protocol.rpc.channel import open_async_channel, open_channel
from ps_protocol.rpc.client_errors import translate
from ps_protocol.security.roles import Access, AccessRole
from ps_protocol.security.security import CredentialsReplaced, Security
from ps_protocol.security.settings import SecuritySettings
from ps_server.certs import Authority
from ps_server.serving import authorization, grpc_server
from ps_server.serving.authorization import Authorization
from tests.support.certificates import write_pair
from tests.support.loops import LoopThread
from tests.support.shards import wait_until

CHECK = health_pb2.HealthCheckRequest()
SERVING = health_pb2.HealthCheckResponse.SERVING


class Files:
    """A server's and a client's certificate of one authority."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.replace(Authority.make("first"))

    def replace(self, authority: Authority) -> None:
        """The authority last: neither side accepts the new certificates before it."""
        write_pair(self.folder, "server", authority.issue("coordinator/job", ["127.0.0.1"]))
        write_pair(self.folder, "client", authority.issue("viewer/me"))
        write_pair(self.folder, "ca", authority.own)

    def security(self, name: str, role: AccessRole) -> Security:
        pair = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        settings = SecuritySettings(*pair, self.folder / "ca.pem", require_client=name == "server")
        return Security(settings, role, listens=name == "server")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Files, LoopThread]]:
    files = Files(tmp_path)
    with LoopThread() as loop:
        trusted = Authorization(files.security("server", AccessRole.SERVER))
        server = loop.run(grpc_server.start("127.0.0.1", 0, [], authorization=trusted))
        yield server.address, files, loop
        loop.run(server.stop(0))


def test_new_calls_use_new_files_and_calls_in_progress_go_on(served):
    address, files, _ = served
    security = files.security("client", AccessRole.VIEWER)
    before = security.show().files.value.channel_credentials()
    with open_channel(address, security) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(CHECK, timeout=60).status == SERVING
        watching = stub.Watch(CHECK)
        assert next(watching).status == SERVING
        # Nothing of the first authority is accepted any more.
        files.replace(Authority.make("second"))
        assert stub.Check(CHECK, timeout=60).status == SERVING
        assert stub.Check.future(CHECK, timeout=60).result().status == SERVING
        assert watching.is_active()
        assert len(channel.connections._before) == 1
        watching.cancel()
        wait_until(lambda: stub.Check(CHECK, timeout=60).status == SERVING and not channel.connections._before)
    with grpc.secure_channel(address, before) as old, pytest.raises(grpc.RpcError) as refused:
        health_pb2_grpc.HealthStub(old).Check(CHECK, timeout=60)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_closed_channel_opens_no_other(served):
    address, files, _ = served
    channel = open_channel(address, files.security("client", AccessRole.VIEWER))
    stub = health_pb2_grpc.HealthStub(channel)
    assert stub.Check(CHECK, timeout=60).status == SERVING
    channel.close()
    files.replace(Authority.make("second"))
    with pytest.raises(ValueError, match="closed"):
        stub.Check(CHECK, timeout=60)


def test_an_asynchronous_channel_connects_again_with_new_files(served):
    address, files, loop = served

    async def check() -> list[int]:
        async with open_async_channel(address, files.security("client", AccessRole.VIEWER)) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            found = [(await stub.Check(CHECK, timeout=60)).status]
            watching = stub.Watch(CHECK)
            found.append((await watching.read()).status)
            files.replace(Authority.make("second"))
            for _ in range(2):
                found.append((await stub.Check(CHECK, timeout=60)).status)
            assert not watching.done()
            watching.cancel()
            return found

    assert loop.run(check()) == [SERVING] * 4


def test_a_call_that_looked_before_another_does_not_bring_the_older_files_back(served):
    address, files, _ = served
    with open_channel(address, files.security("client", AccessRole.VIEWER)) as channel:
        looked = channel.credentials.show()
        files.replace(Authority.make("second"))
        newer = channel.connections.take(channel.credentials.show())
        assert channel.connections.take(looked) is newer


def test_a_refused_call_can_be_repeated_where_the_client_has_newer_files_and_is_final_where_it_has_not(
    tmp_path, monkeypatch
):
    viewers = {f"/grpc.health.v1.Health/{name}": Access(frozenset({AccessRole.VIEWER})) for name in ("Check", "Watch")}
    monkeypatch.setattr(authorization, "METHODS", viewers)
    tokens, lines = {name: tmp_path / name for name in ("server", "client")}, "viewer:me:" + "x" * 20 + "\n"

    def replace(path: Path, text: str) -> None:
        partial = path.with_suffix(".part")
        partial.touch(0o600)
        partial.write_text(text)
        partial.replace(path)

    for path in tokens.values():
        replace(path, lines)
    security = Security(SecuritySettings(token_file=tokens["client"]), AccessRole.VIEWER)
    with LoopThread() as loop:
        trusted = Authorization(Security(SecuritySettings(token_file=tokens["server"]), AccessRole.SERVER))
        server = loop.run(grpc_server.start("127.0.0.1", 0, [], authorization=trusted))
        with open_channel(server.address, security) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            replace(tokens["server"], lines.replace("x", "y"))

            def refused() -> PsError:
                with pytest.raises(grpc.RpcError) as caught:
                    stub.Check(CHECK, timeout=60)
                return translate(caught.value)

            assert isinstance(refused(), Unauthenticated)
            assert str(tokens["client"]) in refused().actual
            call = stub.Watch(CHECK)
            with pytest.raises(grpc.RpcError):
                next(call)
            replace(tokens["client"], "viewer:me:")  # half of a line
            assert isinstance(refused(), CredentialsReplaced)
            replace(tokens["client"], lines.replace("x", "y"))
            assert isinstance(translate(call), CredentialsReplaced)
            assert stub.Check(CHECK, timeout=60).status == SERVING

        async def check() -> PsError:
            async with open_async_channel(server.address, security) as channel:
                replace(tokens["server"], lines)
                call = health_pb2_grpc.HealthStub(channel).Watch(CHECK)
                with pytest.raises(grpc.RpcError) as caught:
                    await call.read()
                replace(tokens["client"], lines)
                return translate(caught.value)

        assert isinstance(loop.run(check()), CredentialsReplaced)
        loop.run(server.stop(0))
