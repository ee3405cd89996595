"""The page's server, without a browser: who is let in, what is answered, what is refused."""

from __future__ import annotations

import importlib.util
import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from ps_protocol.cluster.view import Role
from ps_protocol.errors import ConfigError
from ps_protocol.security.credentials import bearer
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.settings import SecuritySettings
from ps_server.certs import Authority
from ps_server.page import app, broadcast
from ps_server.page.needs import check_libraries
from ps_server.page.server import PageServer
from tests.page.jobs import running_page
from tests.support.certificates import made_folder, security_of, write_pair
from tests.support.shards import wait_until

#: A server that is kept waiting by a busy machine answers all the same; httpx gives up after 5 s.
Client, get, post, stream = (partial(f, timeout=60) for f in (httpx.Client, httpx.get, httpx.post, httpx.stream))

VIEWER, WORKER = "viewer-secret-0123456789;,", "worker-secret-0123456789"


@pytest.fixture
def guarded(tmp_path: Path) -> Security:
    """Tokens without TLS, on loopback."""
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text(f"viewer:eve:{VIEWER}\nworker:wes:{WORKER}\n")
    return Security(SecuritySettings(token_file=tokens), AccessRole.SERVER, listens=True)


@contextmanager
def messages(client: httpx.Client, path: str = "events") -> Iterator[Iterator[Any]]:
    with client.stream("GET", path) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        yield (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))


def test_the_page_and_its_files_forbid_requests_to_elsewhere() -> None:
    with running_page() as job, Client(base_url=job.url) as client:
        page = client.get("/")
        assert "torch-ps job" in page.text
        assert "http://" not in page.text
        assert "https://" not in page.text
        for path in ("/", "/static/page.css", "/static/live.js", "/nothing", "/events?x"):
            with client.stream("GET", path) as answer:
                assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
                assert answer.headers["x-content-type-options"] == "nosniff"
        assert client.get("/nothing").status_code == 404
        assert client.get("/static/../server.py").status_code == 404
        assert client.post("/", data={"a": "b"}).status_code == 405


def test_the_events_tell_the_job_and_what_changes() -> None:
    with running_page() as job, Client(base_url=job.url) as client, messages(client) as told:
        first = next(told)
        assert first["head"]["live_workers"] == 0
        assert first["configuration"]["page"] == job.url
        worker = job.join(Role.WORKER, 3)
        message = next(message for message in told if "workers" in message)
        assert message["workers"]["rows"][0][message["workers"]["fields"].index("name")] == "worker 3"
        job.beat(worker, steps=5, metrics={"loss": 0.5})
        assert next(message for message in told if "head" in message)["head"]["reported"] == {"loss": 0.5}


def test_the_coordinator_is_asked_while_somebody_looks_and_logged_once_if_it_does_not_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[int] = []

    async def source() -> Any:
        asked.append(1)
        raise TimeoutError

    page = PageServer("127.0.0.1", 0, source, Security.off())
    try:
        get(page.url)
        assert asked == []
        with stream("GET", page.url + "events"):
            wait_until(lambda: len(asked) > 2)
    finally:
        page.close()
    assert [record.getMessage() for record in caplog.records if "does not answer" in record.getMessage()] == [
        "the coordinator does not answer its page"
    ]


def test_a_page_of_another_site_cannot_read_this_one_by_a_name_of_its_own() -> None:
    with running_page() as job:
        port = job.url.rstrip("/").rpartition(":")[2]
        for name in ("evil.example", f"evil.example:{port}", "["):
            assert get(job.url, headers={"host": name}).status_code == 421
        for name in ("localhost", "127.0.0.1", socket.gethostname()):
            assert get(job.url, headers={"host": f"{name}:{port}"}).status_code == 200


def test_without_a_token_there_is_a_form_and_no_state(guarded: Security) -> None:
    with running_page(guarded) as job, Client(base_url=job.url) as client:
        page = client.get("/")
        assert page.status_code == 401
        assert 'type="password"' in page.text
        assert "does not know" not in page.text
        assert client.get("/events").status_code == 401
        assert client.get("/check").status_code == 401
        assert guarded.refused.counts["unauthenticated"] == 3


def test_a_token_from_the_form_is_kept_in_a_cookie_that_scripts_cannot_read(guarded: Security) -> None:
    with running_page(guarded) as job, Client(base_url=job.url) as client:
        answer = client.post("/token", data={"token": f" {VIEWER} "})
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert VIEWER not in cookie
        assert client.get("/").status_code == 200
        assert client.get("/check").status_code == 204
        with messages(client) as told:
            assert next(told)["head"]["state"] == "waiting for members"


def test_a_token_in_the_address_is_exchanged_for_a_cookie(guarded: Security) -> None:
    with running_page(guarded) as job, Client(base_url=job.url, follow_redirects=True) as client:
        page = client.get("/", params={"token": VIEWER})
        assert page.status_code == 200
        assert str(page.url) == job.url


def test_a_token_in_a_header_will_do(guarded: Security) -> None:
    with running_page(guarded) as job:
        assert get(job.url, headers={"authorization": f"Bearer {VIEWER}"}).status_code == 200


@pytest.mark.parametrize(
    ("token", "status", "words"),
    [
        ("wrong-token-0123456789", 401, "does not know the token"),
        ("", 401, ""),
        (WORKER, 403, "the page needs the role"),
    ],
)
def test_other_tokens_are_refused_with_the_reason(guarded: Security, token: str, status: int, words: str) -> None:
    with running_page(guarded) as job, Client(base_url=job.url) as client:
        for answer in (client.get("/", params={"token": token}), client.post("/token", data={"token": token})):
            assert answer.status_code == status
            assert words in answer.text
            assert "set-cookie" not in answer.headers


def test_events_end_when_the_token_of_their_viewer_is_removed(guarded: Security) -> None:
    file = guarded.settings.token_file
    assert file is not None
    with running_page(guarded) as job, Client(base_url=job.url) as client:
        client.headers["authorization"] = bearer(VIEWER)
        with messages(client) as told:
            next(told)
            partial = file.with_suffix(".part")
            partial.touch(0o600)
            partial.write_text(f"worker:wes:{WORKER}\n")
            partial.replace(file)
            for _ in told:
                pass
        assert client.get("/check").status_code == 401


def test_nonsense_in_cookie_and_form_is_refused(guarded: Security) -> None:
    with running_page(guarded) as job:
        name = f"torch_ps_{job.url.rstrip('/').rpartition(':')[2]}"
        for value in ("a", "%%%", "=" * 5000, "4pyT"):
            assert get(job.url, cookies={name: value}).status_code == 401
        assert post(job.url + "token", content=b"token=" + b"x" * 10_000).status_code == 413
        assert post(job.url + "token", content=b"\xff\xfe").status_code == 401


def test_under_tls_the_page_takes_a_token(tmp_path: Path) -> None:
    folder = made_folder(tmp_path / "certs")
    security = security_of(folder, "coordinator", require_client=False)
    context = ssl.create_default_context(cafile=str(folder.authority_file))
    token = bearer(security_of(folder, "viewer").show().token.secret)
    with running_page(security) as job:
        assert job.url.startswith("https://")
        assert get(job.url, verify=context).status_code == 401
        assert get(job.url, verify=context, headers={"authorization": token}).status_code == 200
        answer = get(job.url, verify=context, params={"token": token.removeprefix("Bearer ")})
        assert answer.status_code == 303
        assert "Secure" in answer.headers["set-cookie"]


def test_where_certificates_are_required_that_of_a_viewer_or_a_token_will_do(tmp_path: Path) -> None:
    folder = made_folder(tmp_path / "certs")
    anybody = ssl.create_default_context(cafile=str(folder.authority_file))
    with running_page(security_of(folder, "coordinator", require_client=True)) as job:
        assert get(job.url, verify=security_of(folder, "viewer").client_context()).status_code == 200
        assert get(job.url, verify=security_of(folder, "worker").client_context()).status_code == 403
        assert get(job.url, verify=anybody).status_code == 401
        line = (folder.path / "viewer.token").read_text()
        assert post(job.url + "token", verify=anybody, data={"token": line}).status_code == 303
        stranger = Authority.make("stranger")
        anybody.load_cert_chain(*write_pair(tmp_path, "stranger", stranger.issue("viewer/eve")))
        with pytest.raises(httpx.TransportError):
            get(job.url, verify=anybody)


def test_one_viewer_too_many_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "VIEWERS", 1)
    with running_page() as job, Client(base_url=job.url) as client, messages(client) as told:
        next(told)
        answer = get(job.url + "events")
        assert answer.status_code == 503
        assert "look at this page already" in answer.text


def test_connections_that_ask_nothing_keep_nobody_out_and_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_protocol.times.REQUEST_SECONDS", 2.0)
    with running_page() as job, ExitStack() as stack:
        address = job.url.removeprefix("http://").rstrip("/").rpartition(":")
        flood = [
            stack.enter_context(socket.create_connection((address[0], int(address[2])), timeout=60)) for _ in range(300)
        ]
        for number, each in enumerate(flood):
            with suppress(ConnectionError):
                each.sendall(
                    (b"", b"GET / HT", b"POST /token HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")[
                        number % 3
                    ]
                )
        wait_until(lambda: _answers(job.url))
        with Client(base_url=job.url) as client:
            begun: list[Iterator[Any]] = []
            wait_until(lambda: _begins(client, begun, stack))
            (told,) = begun
            next(told)
            for each in flood:
                with suppress(ConnectionError):
                    assert each.recv(1) == b""
            # A stream of events has no limit of time.
            next(told)
            next(told)


def _begins(client: httpx.Client, begun: list[Iterator[Any]], stack: ExitStack) -> bool:
    """As ``_answers``, for events."""
    with suppress(httpx.TransportError):
        begun.append(stack.enter_context(messages(client)))
        return True
    return False


def _answers(url: str) -> bool:
    """A request that comes later than the limit, from a process that is kept waiting, is cut off as well."""
    with suppress(httpx.TransportError):
        return bool(get(url).status_code == 200)
    return False


def test_one_host_cannot_take_all_places_of_viewers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "HOST_VIEWERS", 1)
    with running_page() as job, Client(base_url=job.url) as client:
        with messages(client) as told:
            next(told)
            answer = get(job.url + "events")
            assert answer.status_code == 503
            assert "browsers of your host" in answer.text
        wait_until(lambda: _follows(job.url))


def _follows(url: str) -> bool:
    with stream("GET", url + "events") as answer:
        return answer.status_code == 200


def test_a_port_that_is_taken_is_a_typed_error() -> None:
    async def source() -> Any:
        raise AssertionError("nobody looks")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"the page cannot listen on 127.0.0.1:{port}"):
            PageServer("127.0.0.1", port, source, Security.off())


def test_beyond_loopback_the_page_needs_security() -> None:
    async def source() -> Any:
        raise AssertionError("nobody looks")

    with pytest.raises(ConfigError, match="the page would listen on"):
        PageServer("0.0.0.0", 0, source, Security.off())


def test_libraries_that_are_missing_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("ps_server.page.needs.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="jinja2, starlette, uvicorn") as error:
        check_libraries("the page (--page-port)")
    assert "pip install 'torch-ps[page]'" in error.value.remedy


def test_closing_the_page_ends_streams_that_are_open() -> None:
    with running_page() as job, Client(base_url=job.url) as client, messages(client) as told:
        next(told)
        job.stop()
        with suppress(httpx.RemoteProtocolError):  # ended in the middle, for this server waits for nobody
            for _ in told:
                pass
