"""The HTTP server of metrics: formats, other paths, limits, and who may read."""

import http.client
import json
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ps_protocol import times
from ps_protocol.errors import ConfigError, Unavailable
from ps_protocol.metrics import server as server_module
from ps_protocol.metrics.definition import Catalogue
from ps_protocol.metrics.histogram import Histogram
from ps_protocol.metrics.server import MetricsServer, Target
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.settings import SecuritySettings
from tests.support.certificates import authority, write_pair
from tests.support.shards import wait_until

TEST = Catalogue("test", "shard")
ROWS = TEST.gauge("rows", "Rows of a table.", "table")
STEPS = TEST.counter("steps_total", "Steps.")
WAIT = TEST.histogram("wait_seconds", "Waits.")


def samples():
    wait = Histogram((1.0, 2.0))
    for value in (0.5, 1.5, 9.0):
        wait.observe(value)
    return [ROWS.of(3, 'a "quoted"\nname'), STEPS.of(7), WAIT.of(wait.value), ROWS.of(4, "b")]


@pytest.fixture
def serve():
    running = []

    def start(read=samples, **named):
        running.append(MetricsServer("127.0.0.1", 0, read, {"shard": "1"}, **named))
        return running[-1]

    yield start
    for each in running:
        each.close()
        each.close()


def get(server, path="/metrics", *, method="GET", context=None, host="", **headers):
    named, _, port = server.address.rpartition(":")
    host = host or named
    made = http.client.HTTPSConnection if context else http.client.HTTPConnection
    connection = made(host, int(port), timeout=60, **({"context": context} if context else {}))
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read().decode()
    finally:
        connection.close()


def test_every_sample_has_its_labels_and_the_constant_one_and_names_are_escaped(serve):
    status, headers, text = get(serve())
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    rows = {sample.labels["table"]: sample for sample in families["torch_ps_rows"].samples}
    assert {name: sample.value for name, sample in rows.items()} == {'a "quoted"\nname': 3.0, "b": 4.0}
    assert {sample.labels["shard"] for sample in rows.values()} == {"1"}
    assert families["torch_ps_steps"].samples[0].value == 7
    assert families["torch_ps_rows"].documentation == "Rows of a table."
    found = {
        (sample.name, sample.labels.get("le")): sample.value for sample in families["torch_ps_wait_seconds"].samples
    }
    assert found == {
        ("torch_ps_wait_seconds_bucket", "1.0"): 1,
        ("torch_ps_wait_seconds_bucket", "2.0"): 2,
        ("torch_ps_wait_seconds_bucket", "+Inf"): 3,
        ("torch_ps_wait_seconds_count", None): 3,
        ("torch_ps_wait_seconds_sum", None): 11,
    }


def test_a_client_that_asks_for_openmetrics_gets_it(serve):
    _, headers, text = get(serve(), Accept="application/openmetrics-text; version=1.0.0")
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")


def test_head_has_the_length_and_no_body(serve):
    server = serve()
    status, headers, text = get(server, method="HEAD")
    assert (status, text) == (200, "")
    assert int(headers["Content-Length"]) == len(get(server)[2].encode())


def test_other_paths_name_what_there_is(serve):
    status, _, text = get(serve(), "/targets")
    assert (status, text) == (404, "nothing is here; known: /metrics\n")
    assert get(serve(targets=list), "/")[2] == "nothing is here; known: /metrics, /targets\n"


def test_targets_are_the_process_itself_and_the_others(serve):
    server = serve(targets=lambda: [Target("10.0.0.7:9000", "shard")], component="coordinator")
    status, headers, text = get(server, "/targets?x=1")
    assert (status, headers["Content-Type"]) == (200, "application/json; charset=utf-8")
    assert text == (
        f'[{{"targets": ["{server.address}"], "labels": {{"component": "coordinator"}}}}, '
        '{"targets": ["10.0.0.7:9000"], "labels": {"component": "shard"}}]'
    )


def test_a_label_that_is_learnt_later_is_on_every_sample_and_the_job_s_on_every_target(serve):
    server = serve(targets=lambda: [Target("10.0.0.7:9000", "shard")])
    server.label(ps_job="night")
    families = text_string_to_metric_families(get(server)[2])
    labels = [sample.labels for family in families for sample in family.samples]
    assert labels
    assert {(each["shard"], each["ps_job"]) for each in labels} == {("1", "night")}
    assert [each["labels"]["ps_job"] for each in json.loads(get(server, "/targets")[2])] == ["night", "night"]


def test_a_process_that_cannot_answer_is_told_as_503(serve):
    def stuck():
        raise Unavailable("the process has not answered for 5 s")

    assert get(serve(stuck))[::2] == (503, "the process has not answered for 5 s\n")


def test_a_port_that_is_taken_is_refused_with_a_remedy(serve):
    _, _, port = serve().address.rpartition(":")
    with pytest.raises(ConfigError, match=f"cannot serve metrics on 127.0.0.1:{port}.*--metrics-port"):
        MetricsServer("127.0.0.1", int(port), samples, {})


def test_connections_without_a_whole_request_keep_nobody_out(serve):
    server = serve()
    host, _, port = server.address.rpartition(":")
    with ExitStack() as stack:
        held = []
        while len(held) < server_module.CONNECTIONS:
            held.append(stack.enter_context(socket.create_connection((host, int(port)), timeout=60)))
            held[-1].sendall(b"GET /metrics HTT")
            # Each is served by a thread of its own: one that begins late would count as the younger one.
            wait_until(lambda: len(server._server._served) == len(held))
        for _ in range(3):
            assert get(server)[0] == 200
        assert held[0].recv(1) == b"", "the one that has waited longest is closed"


def test_where_all_places_are_taken_by_whole_requests_a_further_connection_is_closed(serve, monkeypatch):
    monkeypatch.setattr(server_module, "CONNECTIONS", 1)
    reading, goes_on = threading.Event(), threading.Event()

    def slow():
        reading.set()
        assert goes_on.wait(60)
        return samples()

    server = serve(slow)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(get, server)
        assert reading.wait(60)
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as further:
            assert further.recv(1) == b"", "it is closed at once"
        goes_on.set()
        assert first.result(60)[0] == 200


@pytest.mark.parametrize("under_tls", [False, True])
def test_a_request_has_its_time_in_all_however_slowly_it_comes(serve, guarded, monkeypatch, under_tls):
    """Each byte comes in time, the whole does not."""
    monkeypatch.setattr(times, "REQUEST_SECONDS", 1.0)
    host, _, port = (guarded[0] if under_tls else serve()).address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=0.2) as slow, suppress(ConnectionError):
        ended = False
        while not ended:
            slow.sendall(b"\x16" if under_tls else b"a")
            with suppress(TimeoutError):
                ended = not slow.recv(1)


@pytest.mark.parametrize(
    ("named", "status"),
    [
        ("evil.example", 421),
        ("evil.example:9090", 421),
        ("localhost", 200),
        ("LOCALHOST:9090", 200),
        ("127.0.0.1:9090", 200),
        ("10.1.2.3:9090", 200),
        ("[::1]:9090", 200),
        (socket.gethostname(), 200),
        ("here.example:9090", 200),
        ("", 200),
        ("[", 421),
    ],
)
def test_on_loopback_a_page_of_another_site_cannot_read_metrics_by_a_name_of_its_own(serve, named, status):
    assert get(serve(advertise="here.example"), host="127.0.0.1", Host=named)[0] == status


def test_where_callers_prove_who_they_are_every_name_will_do(guarded):
    server, _, context = guarded
    assert server.url == f"https://{server.address}/metrics"
    shown = {"Authorization": "Bearer viewerviewerviewer1", "Host": "metrics.example"}
    assert get(server, context=context, **shown)[0] == 200


@pytest.fixture
def guarded(tmp_path, serve):
    write_pair(tmp_path, "ca", authority().own)
    certificate, key = write_pair(tmp_path, "server", authority().issue("coordinator/job", ["127.0.0.1", "localhost"]))
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text("viewer:grafana:viewerviewerviewer1\nworker:w:workerworkerworker1\n")
    settings = SecuritySettings(certificate, key, tmp_path / "ca.pem", token_file=tokens)
    security = Security(settings, AccessRole.SERVER, listens=True)
    return serve(security=security), security, ssl.create_default_context(cafile=tmp_path / "ca.pem")


@pytest.mark.parametrize(
    ("headers", "status", "reason", "says"),
    [
        ({}, 401, "unauthenticated", "token"),
        ({"Authorization": "Bearer wrongwrongwrongwrong"}, 401, "unauthenticated", "token"),
        ({"Authorization": "Bearer workerworkerworker1"}, 403, "permission", "needs the role admin or"),
    ],
)
def test_another_caller_is_refused_and_counted(guarded, headers, status, reason, says):
    server, security, context = guarded
    found, answered, text = get(server, context=context, **headers)
    assert (found, answered["WWW-Authenticate"]) == (status, "Bearer" if status == 401 else None)
    assert says in text
    assert security.refused.counts[reason] == 1
    assert "torch_ps" not in text
    page = get(server, context=context, Authorization="Bearer viewerviewerviewer1")[2]
    found = {
        (sample.name.removeprefix("torch_ps_"), sample.labels.get("reason")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert found["auth_failures_total", reason] == 1
    assert found["certificate_expiry_timestamp_seconds", None] == security.certificate_expiry > time.time()


def test_plain_http_to_a_tls_port_gets_no_answer(guarded):
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        get(guarded[0])
