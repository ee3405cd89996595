"""What is wrong with a file of security is said at the start, by its name; a file that is replaced is read again."""

import ssl
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from ps_protocol.errors import ConfigError
from ps_protocol.security import tls
from ps_protocol.security.credentials import OwnTokens
from ps_protocol.security.files import WatchedFiles, read_secret
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import OFF, Security
from ps_protocol.security.settings import VARIABLES, BulkSecurity, SecuritySettings
from ps_protocol.security.tokens import AccessToken, TokenFile, parse_tokens
from ps_server import certs
from ps_server.certs import Authority, CertificateFolder
from tests.support.certificates import authority, made_folder, security_of, write_pair

SECRET = "0123456789abcdef0123"


def token_file(path: Path, text: str) -> Path:
    partial = path.with_suffix(".part")
    partial.touch(0o600)
    partial.write_text(text)
    return partial.replace(path)


def server_settings(folder: Path, **changes: object) -> SecuritySettings:
    write_pair(folder, "ca", authority().own)
    certificate, key = write_pair(folder, "server", authority().issue("coordinator/job", ["localhost"]))
    return SecuritySettings(certificate, key, folder / "ca.pem").with_given(**changes)


def refusal(settings: SecuritySettings, **named: bool) -> str:
    with pytest.raises(ConfigError) as caught:
        Security(settings, AccessRole.SERVER, **named)
    return str(caught.value)


def test_a_certificate_and_an_authority_that_have_expired_are_refused_with_file_and_date(tmp_path):
    settings = server_settings(tmp_path)
    expired = authority().issue("coordinator/job", ["localhost"], days=-1)
    for name, pair in (("server", expired), ("ca", Authority.make(days=-1).own)):
        server_settings(tmp_path)
        write_pair(tmp_path, name, pair)
        assert f"{tmp_path}/{name}.pem has expired on 20" in refusal(settings)


def test_a_key_of_another_certificate_is_refused(tmp_path):
    settings = server_settings(tmp_path)
    _, other = write_pair(tmp_path, "other", authority().issue("coordinator/job"))
    text = refusal(settings.with_given(tls_key=other))
    assert f"the key in {other} is not that of the certificate in {settings.tls_cert}" in text


@pytest.mark.parametrize("mode", [0o644, 0o606, 0o777])
def test_a_key_that_others_may_read_is_refused(tmp_path, mode):
    settings = server_settings(tmp_path)
    (tmp_path / "server.key").chmod(mode)
    assert f"{tmp_path}/server.key is open to other users" in (text := refusal(settings))
    assert f"{mode:04o}" in text


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("server.pem", b"nothing", "has no certificate in PEM form"),
        ("server.key", b"nothing", "has no private key in PEM form"),
        ("ca.pem", b"", "has no certificate in PEM form"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path, name, data, said):
    settings = server_settings(tmp_path)
    (tmp_path / name).write_bytes(data)
    assert said in (text := refusal(settings))
    assert str(tmp_path / name) in text


@pytest.mark.parametrize("name", ["tls_cert", "tls_key", "tls_ca", "token_file"])
def test_a_file_that_is_missing_is_named(tmp_path, name):
    missing = tmp_path / "missing"
    assert f"{missing} cannot be read" in refusal(server_settings(tmp_path, **{name: missing}))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tls_cert": Path("a")}, "--tls-ca"),
        ({"tls_ca": Path("a"), "tls_cert": Path("a")}, "--tls-key"),
        ({"tls_ca": Path("a"), "tls_key": Path("a")}, "--tls-cert"),
    ],
)
def test_files_that_lack_another_are_refused(given, said):
    assert f"TLS needs {said}" in refusal(SecuritySettings(**given))


def test_a_server_needs_a_certificate_and_a_client_does_not(tmp_path):
    settings = server_settings(tmp_path)
    settings = SecuritySettings(tls_ca=settings.tls_ca)
    assert "a server with TLS needs a certificate" in refusal(settings, listens=True)
    assert Security(settings, AccessRole.WORKER).tls


@pytest.mark.parametrize(
    "line",
    ["worker", "worker:", "worker::" + SECRET, "worker:a:short", "boss:a:" + SECRET, "worker:a:with a space 123"],
)
def test_a_line_that_is_no_token_is_refused_by_its_number_and_without_its_secret(tmp_path, line):
    path = token_file(tmp_path / "tokens", f"# all\n\nadmin:a:{SECRET}\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        TokenFile(path)
    assert f"{path}, line 4" in str(caught.value)
    assert line.rpartition(":")[2] not in str(caught.value) or line.count(":") < 2 or line == "worker:a:short"


def test_a_file_without_tokens_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no token"):
        TokenFile(token_file(tmp_path / "tokens", "# none\n"))


def test_a_token_is_found_by_its_secret_alone(tmp_path):
    file = TokenFile(token_file(tmp_path / "tokens", f"admin:a:{SECRET}\nworker:b:{SECRET[::-1]}:x\n"))
    assert file.find(SECRET) == AccessToken(AccessRole.ADMIN, "a", SECRET)
    assert file.find(f"{SECRET[::-1]}:x").name == "b"
    assert [file.find(wrong) for wrong in ("", SECRET[:-1], SECRET + "0", "a", "\udc80é")] == [None] * 5
    assert SECRET not in repr(file.tokens)


@pytest.mark.parametrize(
    ("role", "name"),
    [
        (AccessRole.WORKER, "w"),
        (AccessRole.ADMIN, "r"),
        (AccessRole.READER, "r"),
        (AccessRole.SERVER, "v"),
    ],
)
def test_a_process_sends_the_first_token_of_its_role_else_the_first(tmp_path, role, name):
    text = f"viewer:v:{SECRET}\nworker:w:{SECRET}1\nreader:r:{SECRET}2\nworker:w2:{SECRET}3\n"
    own = OwnTokens(SecuritySettings(), role, TokenFile(token_file(tmp_path / "tokens", text)))
    assert own.token.name == name


def test_a_token_of_the_environment_goes_before_the_file():
    assert OwnTokens(SecuritySettings(token=SECRET), AccessRole.READER, None).token.role is AccessRole.READER
    assert OwnTokens(SecuritySettings(token=f"admin:me:{SECRET}"), AccessRole.READER, None).token.name == "me"
    assert SECRET not in repr(SecuritySettings(token=SECRET))
    with pytest.raises(ConfigError, match="PS_TOKEN"):
        OwnTokens(SecuritySettings(token="short"), AccessRole.READER, None)


def test_every_setting_passes_through_the_environment():
    settings = SecuritySettings(
        Path("c"), Path("k"), Path("a"), True, Path("t"), SECRET, True, BulkSecurity.TOKEN_ONLY, 5, "night", False
    )
    environment = settings.environment
    assert set(environment) == set(VARIABLES.values())
    assert SecuritySettings.from_environment(environment) == settings
    assert SecuritySettings().environment == {}


@pytest.mark.parametrize(
    ("variable", "value"),
    [("PS_INSECURE", "yes"), ("PS_TLS_REQUIRE_CLIENT", "2"), ("PS_SHM_UID", "me"), ("PS_BULK_SECURITY", "none")],
)
def test_a_variable_with_a_wrong_value_is_named(variable, value):
    with pytest.raises(ConfigError, match=variable):
        SecuritySettings.from_environment({variable: value})


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "192.0.2.7", "2001:db8::1"])
def test_a_bind_beyond_loopback_needs_tls_and_tokens_or_insecure(tmp_path, host, caplog):
    tokens = token_file(tmp_path / "tokens", f"admin:a:{SECRET}\n")
    for settings, missing in (
        (SecuritySettings(), "TLS and tokens"),
        (SecuritySettings(token_file=tokens), "TLS"),
        (server_settings(tmp_path), "tokens"),
    ):
        with pytest.raises(ConfigError, match=f"without {missing}"):
            Security(settings, AccessRole.SERVER).check_bind(host, "the coordinator")
        caplog.clear()
        Security(settings.with_given(insecure=True), AccessRole.SERVER).check_bind(host, "the coordinator")
        assert f"without {missing}" in caplog.text
    for more in ({"token_file": tokens}, {"require_client": True}):
        Security(server_settings(tmp_path, **more), AccessRole.SERVER).check_bind(host, "the coordinator")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost"])
def test_a_bind_to_loopback_needs_nothing(host):
    OFF.check_bind(host, "the coordinator")


def test_files_that_change_between_two_looks_are_loaded_once_more(tmp_path):
    path, loads = tmp_path / "file", []
    path.write_text("1")
    watched = WatchedFiles([path], lambda: loads.append(path.read_text()) or loads[-1])
    assert [watched.current().value for _ in range(3)] == ["1"] * 3
    path.write_text("22")
    assert [watched.current().value for _ in range(3)] == ["22"] * 3
    assert loads == ["1", "22"]
    assert watched.current().generation == 2


def test_a_secret_of_root_may_be_read_by_its_group(tmp_path):
    path = tmp_path / "secret"
    path.write_text("x")
    path.chmod(0o640)
    if path.stat().st_uid == 0:
        assert read_secret(path, "the key") == b"x"
    else:
        with pytest.raises(ConfigError, match="0640"):
            read_secret(path, "the key")


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[str, int]:
    """Through memory: the cipher's version, and the serial number of the server's certificate."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = server.wrap_bio(to_server, to_client, server_side=True)
    two = client.wrap_bio(to_client, to_server, server_hostname="localhost")
    for _ in range(5):
        for side in (two, one):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
    return two.version(), int(two.getpeercert()["serialNumber"], 16)


def test_contexts_speak_tls_1_3_and_one_that_was_given_away_uses_new_files(tmp_path):
    settings = server_settings(tmp_path, require_client=True)
    security = Security(settings, AccessRole.SERVER, listens=True)
    server = security.server_context()
    version, first = handshake(server, security.client_context())
    assert version == "TLSv1.3"
    # Another authority, too: the store of trusted ones is replaced and not added to.
    other = Authority.make("other")
    write_pair(tmp_path, "ca", other.own)
    write_pair(tmp_path, "server", other.issue("coordinator/job", ["localhost"]))
    version, second = handshake(server, security.client_context())
    assert second != first
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.load_verify_locations(cadata=other.own.certificate.decode())
    stranger.load_cert_chain(*write_pair(tmp_path, "old", authority().issue("worker/old")))
    with pytest.raises(ssl.SSLError):
        handshake(server, stranger)


def test_the_folder_of_a_laboratory_has_what_every_process_needs(tmp_path):
    folder, clients = made_folder(tmp_path / "lab"), ("admin", "worker", "reader", "viewer")
    for name in ("coordinator", "shard-0", "shard-1", *clients):
        security = security_of(folder, name)
        assert security.tls
        assert security.show().token.role.value == (name if name in clients else "server")
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.path.iterdir() if path.suffix != ".pem"} == {
        f"{name}": 0o600
        for name in (
            "ca.key",
            "coordinator.key",
            "relay.key",
            "shard-0.key",
            "shard-1.key",
            *(f"{role}.{kind}" for role in clients for kind in ("key", "token")),
            "tokens",
        )
    }
    with pytest.raises(ConfigError, match="exists"):
        folder.make(2, [])


def test_a_folder_is_renewed_from_its_own_authority(tmp_path):
    folder = made_folder(tmp_path)
    security = security_of(folder, "shard-1")
    before, shown = (tmp_path / "shard-1.pem").read_bytes(), security.show()
    folder.renew(2, ["example.org"])
    assert (tmp_path / "shard-1.pem").read_bytes() != before
    assert security.show().files.generation > shown.files.generation
    with pytest.raises(ConfigError, match="cannot be read or written"):
        CertificateFolder(tmp_path / "other").renew(1, [])


def test_replaced_tokens_keep_the_ones_before_when_told(tmp_path):
    folder = made_folder(tmp_path)
    file = TokenFile(folder.token_file)
    before = [token.secret for token in file.tokens]
    folder.replace_tokens(keep=True)
    assert len(file.tokens) == 2 * len(before)
    assert all(file.find(secret) for secret in before)
    folder.replace_tokens()
    assert not any(file.find(secret) for secret in before)


@pytest.mark.parametrize("keep", [True, False])
def test_while_tokens_are_replaced_each_client_has_one_that_servers_accept(tmp_path, monkeypatch, keep):
    folder, writes = made_folder(tmp_path), []
    write = certs.replace_file

    def look_after(path: Path, data: bytes) -> None:
        write(path, data)
        writes.append(path.name)
        accepted = TokenFile(folder.token_file)
        for role in certs.CLIENTS:
            (own,) = parse_tokens((tmp_path / f"{role.value}.token").read_text(), "")
            assert accepted.find(own.secret), (writes, role)

    monkeypatch.setattr(certs, "replace_file", look_after)
    folder.replace_tokens(keep)
    assert len(writes) == 1 + len(certs.CLIENTS) + (not keep)


def test_a_thread_that_asks_while_another_one_loads_gets_what_is_loaded(tmp_path):
    path, loading, may_go_on = tmp_path / "file", threading.Event(), threading.Event()
    path.write_text("1")

    def load() -> str:
        text = path.read_text()
        if text != "1":
            loading.set()
            assert may_go_on.wait(60)
        return text

    watched = WatchedFiles([path], load)
    path.write_text("22")
    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(watched.current)
        assert loading.wait(60)
        two = threads.submit(watched.current)
        # Where it does not wait, it is done soon, with what was replaced.
        assert not wait([two], timeout=0.3).done
        may_go_on.set()
        assert [each.result(60).value for each in (one, two)] == ["22", "22"]
    assert watched.current().generation == 2


def test_a_replacement_that_is_not_taken_is_logged_once_and_known_until_one_is(tmp_path, caplog):
    tokens = TokenFile(token_file(tmp_path / "tokens", f"admin:a:{SECRET}\n"))
    before = tokens.current()
    token_file(tokens.path, "admin:")
    for _ in range(3):
        assert tokens.current().value is before.value
        assert tokens.current().outdated
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
    tokens.path.unlink()
    assert tokens.current().outdated
    token_file(tokens.path, f"admin:b:{SECRET}\n")
    after = tokens.current()
    assert (after.value[0].name, after.generation, after.outdated) == ("b", 2, False)


def test_files_that_openssl_does_not_take_are_refused_when_they_are_read(tmp_path):
    settings = server_settings(tmp_path)
    security = Security(settings, AccessRole.SERVER, listens=True)
    with_comment = "# \N{LATIN SMALL LETTER E WITH ACUTE}\n".encode() + settings.tls_ca.read_bytes()
    settings.tls_ca.write_bytes(with_comment)
    assert security.show().files.outdated
    with pytest.raises(ConfigError, match="OpenSSL does not take"):
        Security(settings, AccessRole.SERVER, listens=True)


def test_a_server_that_looks_while_its_files_are_replaced_shows_the_new_certificate_next(tmp_path, monkeypatch):
    """Another thread takes new files between two looks of one that asks what to show."""
    settings = server_settings(tmp_path)
    fetches, shown = [], []
    monkeypatch.setattr(tls.grpc, "dynamic_ssl_server_credentials", lambda first, fetch, require: fetches.append(fetch))
    monkeypatch.setattr(tls.grpc, "ssl_server_certificate_configuration", lambda pairs, roots: pairs[0][1])
    Security(settings, AccessRole.SERVER, listens=True).server_credentials()
    original, replaced = WatchedFiles.current, []

    def current(files: WatchedFiles) -> object:
        found = original(files)
        if not replaced:
            write_pair(tmp_path, "server", authority().issue("coordinator/job", ["localhost"]))
            replaced.append(original(files))
        return found

    monkeypatch.setattr(WatchedFiles, "current", current)
    for _ in range(3):
        if (configuration := fetches[0]()) is not None:
            shown.append(configuration)
    assert replaced
    assert shown == [settings.tls_cert.read_bytes()]


def test_tokens_are_told_apart_from_text_around_them():
    tokens = parse_tokens(f"  admin:a:{SECRET}  \r\n#x\nviewer:v:{SECRET}a\n", "here")
    assert [(token.role, token.name) for token in tokens] == [(AccessRole.ADMIN, "a"), (AccessRole.VIEWER, "v")]
