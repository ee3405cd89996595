"""Every method of every service, called with every role over a real connection: allowed by the table, or refused."""

import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from ps_protocol.cluster.view import Member, Role
from ps_protocol.errors import PermissionDenied, PsError, Unauthenticated, Unavailable
from ps_protocol.rpc.channel import listen, new_server, open_channel
from ps_protocol.rpc.client_errors import translate
from ps_protocol.security.credentials import AUTHORIZATION, SESSION, ShownCredentials, bearer
from ps_protocol.security.roles import JOINING, METHODS, AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.session import SessionSigner
from ps_protocol.security.settings import SecuritySettings
from ps_protocol.security.tokens import AccessToken, parse_tokens
from ps_protocol.v1 import coordinator_pb2, shard_pb2
from ps_server.serving.authorization import Authorization, PeerLogLimit
from tests.support.loops import LoopThread

FILES = (coordinator_pb2, shard_pb2, health_pb2, reflection_pb2)
EVERY = {
    f"/{service.full_name}/{method.name}": method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
ROOT = Path(__file__).parents[3]
SECRETS = {role: f"{role.value}-secret-0123456789" for role in AccessRole}


def test_the_table_has_every_method_of_every_service_and_no_other():
    assert set(METHODS) >= set(EVERY)
    # Newer versions of the health service have one more.
    assert set(METHODS) - set(EVERY) <= {"/grpc.health.v1.Health/List"}


@pytest.mark.parametrize("name", ["CatchUp", "StageReshard"])
def test_a_call_of_a_shard_is_named_in_its_service_and_in_the_table_alone(name):
    """Besides who makes the call."""
    folders = "protos", "ps_server/shard", "ps_server/serving"
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = {path for path in files if "_pb2" not in path.name and re.search(rf"[\"/]{name}\"", path.read_text())}
    assert found == {ROOT / "protos/ps_protocol/security/roles.py", ROOT / "ps_server/shard/service.py"}


def test_members_of_every_kind_can_join():
    assert set(JOINING) == set(Role)


class Reached(grpc.GenericRpcHandler):
    """Answers every method with nothing, and notes that it was reached."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        method = EVERY.get(details.method)
        return self.handler(details.method, method) if method else None

    def handler(self, name: str, method: MethodDescriptor) -> grpc.RpcMethodHandler:
        async def one(request: object, context: grpc.aio.ServicerContext) -> bytes:
            self.requests.append(name)
            return b""

        async def many(request: object, context: grpc.aio.ServicerContext) -> None:
            self.requests.append(name)

        kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(many if method.server_streaming else one, request_deserializer=self.parsed)

    def parsed(self, data: bytes) -> bytes:
        self.requests.append("parsed")
        return data


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Reached, Authorization, SessionSigner]]:
    tokens: Path = tmp_path_factory.mktemp("roles") / "tokens"
    tokens.touch(0o600)
    tokens.write_text("".join(f"{role.value}:{role.value}:{secret}\n" for role, secret in SECRETS.items()))
    security = Security(SecuritySettings(token_file=tokens), AccessRole.SERVER)
    authorization, reached, signer = Authorization(security), Reached(), SessionSigner()
    with LoopThread() as loop:

        async def start() -> tuple[grpc.aio.Server, str]:
            server = new_server([authorization])
            server.add_generic_rpc_handlers((reached,))
            port = listen(server, "127.0.0.1:0", security)
            await server.start()
            return server, f"127.0.0.1:{port}"

        async def stop() -> None:
            await server.stop(None)

        server, address = loop.run(start())
        try:
            yield address, reached, authorization, signer
        finally:
            loop.run(stop())


def call(channel: grpc.Channel, name: str, metadata: tuple[tuple[str, str | bytes], ...]) -> PsError | None:
    """The error of a call without contents; None: it was answered."""
    method = EVERY[name]
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    stub = getattr(channel, kind)(name)
    request = iter([b""]) if method.client_streaming else b""
    try:
        answer = stub(request, metadata=metadata, timeout=60)
        if method.server_streaming:
            list(answer)
    except grpc.RpcError as error:
        return translate(error)
    return None


@pytest.mark.parametrize("role", [*AccessRole, None], ids=lambda role: role.value if role else "nobody")
def test_every_method_answers_the_roles_of_the_table_alone(served, role):
    address, reached, authorization, _ = served
    metadata = ((AUTHORIZATION, bearer(SECRETS[role])),) if role else ()
    with open_channel(address) as channel:
        for name in EVERY:
            roles, before = METHODS[name].roles, sum(authorization.security.refused.counts.values())
            reached.requests.clear()
            error = call(channel, name, metadata)
            counted = sum(authorization.security.refused.counts.values()) - before
            if roles is None or role in roles:
                assert error is None, (name, error)
                assert name in reached.requests
                assert counted == 0
                continue
            assert isinstance(error, PermissionDenied if role else Unauthenticated), (name, error)
            assert reached.requests == []  # not even parsed
            assert counted == 1
            if role:
                assert all(each.value in error.expected for each in roles)


def test_a_method_that_the_table_lacks_is_refused_to_every_role(served, monkeypatch):
    address, *_ = served
    monkeypatch.setitem(EVERY, "/new.Service/Method", EVERY["/ps_protocol.v1.Coordinator/GetStatus"])
    with open_channel(address) as channel:
        for secret in SECRETS.values():
            error = call(channel, "/new.Service/Method", ((AUTHORIZATION, bearer(secret)),))
            assert isinstance(error, PermissionDenied)
            assert "open to nobody" in str(error)


STATUS = "/ps_protocol.v1.Coordinator/GetStatus"


@pytest.mark.parametrize(
    "authorization", ["Bearer wrong", "Bearer ", "Basic abc", SECRETS[AccessRole.ADMIN], "x" * 500]
)
def test_a_wrong_token_is_unauthenticated_and_no_secret_is_told(served, authorization, caplog):
    address, *_ = served
    with open_channel(address) as channel:
        error = call(channel, STATUS, ((AUTHORIZATION, authorization),))
    assert isinstance(error, Unauthenticated)
    assert not any(secret in f"{error} {caplog.text}" for secret in SECRETS.values())


def test_sessions_are_unavailable_until_the_server_has_joined_then_verified(served):
    address, _, authorization, signer = served
    # As it has begun: other tests may have come first.
    authorization.verifier = None
    member = Member(Role.WORKER, 3, 7)
    token = signer.sign(member, frozenset({AccessRole.WORKER}))
    with open_channel(address) as channel:
        assert isinstance(call(channel, STATUS, ((SESSION, token),)), Unavailable)
        authorization.trust(signer.public_key)
        assert call(channel, STATUS, ((SESSION, token),)) is None
        stranger = SessionSigner().sign(member, frozenset({AccessRole.ADMIN}))
        assert isinstance(call(channel, STATUS, ((SESSION, stranger),)), Unauthenticated)
        late = SessionSigner(signer._key, clock=lambda: 0.0).sign(member, frozenset({AccessRole.WORKER}))
        assert "has expired on 1970-01-01" in str(call(channel, STATUS, ((SESSION, late),)))
        for broken in (token[:-1], token[1:], token[:64], b"", b"x" * 5000):
            error = call(channel, STATUS, ((SESSION, broken),))
            assert isinstance(error, Unauthenticated)
        # A session allows what the credential of its Join did.
        denied = call(channel, "/ps_protocol.v1.Coordinator/Checkpoint", ((SESSION, token),))
        assert isinstance(denied, PermissionDenied)


HEARTBEAT = "/ps_protocol.v1.Coordinator/Heartbeat"


def test_a_session_ends_with_the_token_that_it_was_made_with_whatever_the_call_omits(served):
    address, _, authorization, signer = served
    authorization.trust(signer.public_key)
    file, before = authorization.security.settings.token_file, sum(authorization.security.refused.counts.values())
    whole, member, worker = file.read_text(), Member(Role.WORKER, 3, 7), frozenset({AccessRole.WORKER})
    first, second = (parse_tokens(f"worker:{name}:{name}-0123456789012", "here")[0] for name in ("first", "second"))

    def allow(*tokens: AccessToken) -> None:
        partial = file.with_suffix(".part")
        partial.touch(0o600)
        partial.write_text(whole + "".join(f"{each.role.value}:{each.name}:{each.secret}\n" for each in tokens))
        partial.replace(file)

    session = (SESSION, signer.sign(member, worker, first.digest))
    with_second = session, (AUTHORIZATION, bearer(second.secret))
    with_viewer = session, (AUTHORIZATION, bearer(SECRETS[AccessRole.VIEWER]))
    with open_channel(address) as channel:
        allow(first, second)
        for shown in ((session,), with_second, with_viewer):
            assert call(channel, HEARTBEAT, shown) is None
        allow(second)
        # A token of the same role stands for the one that it replaces; one of another role does not.
        assert call(channel, HEARTBEAT, with_second) is None
        for number, shown in enumerate(((session,), with_viewer), 1):
            refused = call(channel, HEARTBEAT, shown)
            assert isinstance(refused, Unavailable)
            assert "the token that the session of worker 3 was made with is not in the token file" in refused.message
            assert sum(authorization.security.refused.counts.values()) == before + number
        # Of a certificate alone: no token ends it.
        assert call(channel, HEARTBEAT, ((SESSION, signer.sign(member, worker)),)) is None


def test_a_call_to_a_shard_shows_its_token_beside_a_session_that_was_made_with_another():
    old, new = (parse_tokens(f"worker:{name}:{name}-0123456789012", "here")[0] for name in ("old", "new"))
    signer, member, worker = SessionSigner(), Member(Role.WORKER, 3, 7), frozenset({AccessRole.WORKER})
    session = signer.sign(member, worker, old.digest)
    alone, both = ((SESSION, session),), ((SESSION, session), (AUTHORIZATION, bearer(new.secret)))
    assert ShownCredentials(None, old, session).metadata(to_shard=True) == alone
    assert ShownCredentials(None, new, session).metadata(to_shard=True) == both
    assert ShownCredentials(None, None, session).metadata(to_shard=True) == alone
    of_certificate = signer.sign(member, worker)
    assert ShownCredentials(None, new, of_certificate).metadata(to_shard=True) == ((SESSION, of_certificate),)
    assert ShownCredentials(None, new, b"nonsense").metadata(to_shard=True) == ((SESSION, b"nonsense"),)


def test_refusals_of_one_peer_are_logged_once_a_second_whatever_its_port():
    now = [0.0]
    limit = PeerLogLimit(lambda: now[0])
    assert [limit.allows(f"ipv4:10.0.0.5:{port}") for port in (1, 2, 3)] == [True, False, False]
    assert limit.allows("ipv4:10.0.0.6:1")
    now[0] = 1.0
    assert limit.allows("ipv4:10.0.0.5:9")
