"""Engines: the file, the Job of Kubernetes over HTTP, a class of the user's own. Costs about 1 CPU s."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.cluster.scaling import ScaleOrder
from ps_protocol.errors import ConfigError, InvalidRequest, PsError, Unavailable
from ps_protocol.launch.ports import free_port
from ps_server.coordinator.elasticity.engines.find import find_engine
from ps_server.coordinator.elasticity.engines.kubernetes import Account, KubernetesJob
from ps_server.coordinator.elasticity.engines.request_file import RequestFile


class FakeApi:
    """The one Job of a namespace, as the API of Kubernetes keeps it: a merge patch, with the version as a condition."""

    def __init__(self, **spec: int) -> None:
        self.job: dict[str, Any] = {
            "kind": "Job",
            "metadata": {"name": "worker", "resourceVersion": "7"},
            "spec": spec,
            "status": {"active": 2, "failed": 1},
        }
        self.asked: list[tuple[str, str]] = []
        #: Answered instead of the Job.
        self.status, self.body = 200, b""
        #: Called before a PATCH.
        self.before_patch = lambda: None

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, bytes]:
        self.asked.append((method, path))
        if headers["Authorization"] != "Bearer secret":
            return 401, b"{}"
        if path != "/apis/batch/v1/namespaces/training/jobs/worker":
            return 404, b"{}"
        if self.status != 200 or self.body:
            return self.status, self.body or b"{}"
        if method == "PATCH":
            self.before_patch()
            patch = json.loads(body)
            if headers["Content-Type"] != "application/merge-patch+json":
                return 415, b"{}"
            if patch["metadata"]["resourceVersion"] != self.job["metadata"]["resourceVersion"]:
                return 409, b"{}"
            self.job["spec"].update(patch["spec"])
        return 200, json.dumps(self.job).encode()


@contextmanager
def served(api: FakeApi, folder: Path) -> Iterator[Account]:
    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            status, body = api.answer(self.command, self.path, self.headers, self.rfile.read(length))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PATCH = _reply  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    (folder / "token").write_text("secret\n")
    try:
        yield Account(f"http://127.0.0.1:{server.server_port}", "training", folder / "token")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_indexed_job_is_scaled_by_as_many_pods_as_are_missing(tmp_path: Path) -> None:
    api = FakeApi(parallelism=3, completions=3)
    with served(api, tmp_path) as account:
        engine = KubernetesJob("worker", account, most=8)
        assert engine.request(4, (2,)) == "Job worker goes from parallelism 3 to 5, 1 pods have failed"
        assert engine.describe() == "Job worker in namespace training of Kubernetes"
    assert api.job["spec"] == {"parallelism": 5, "completions": 5}
    assert [method for method, _ in api.asked] == ["GET", "PATCH"]


def test_a_job_without_completions_gets_none(tmp_path: Path) -> None:
    api = FakeApi(parallelism=2)
    with served(api, tmp_path) as account:
        KubernetesJob("worker", account, most=8).request(3, ())
    assert api.job["spec"] == {"parallelism": 3}


def test_pods_that_are_about_to_start_are_not_asked_for_again(tmp_path: Path) -> None:
    api = FakeApi(parallelism=2)
    with served(api, tmp_path) as account:
        assert KubernetesJob("worker", account, most=8).request(2, ()) == "Job worker has 2 active pods already"
    assert api.job["spec"] == {"parallelism": 2}


def test_a_job_is_not_scaled_beyond_its_limit(tmp_path: Path) -> None:
    api = FakeApi(parallelism=3)
    with served(api, tmp_path) as account:
        engine = KubernetesJob("worker", account, most=4)
        assert engine.request(9, ()) == "Job worker goes from parallelism 3 to 4, 1 pods have failed"
        assert engine.request(9, ()) == "Job worker stays at parallelism 4: that is the limit"


def test_an_indexed_job_is_given_as_many_pods_as_are_wanted_up_to_its_limit(tmp_path: Path) -> None:
    api = FakeApi(parallelism=3, completions=3)
    with served(api, tmp_path) as account:
        engine = KubernetesJob("worker", account, most=4)
        assert engine.scale(ScaleOrder(1, frozenset({0}))) == "Job worker goes from parallelism 3 to 1"
        assert api.job["spec"] == {"parallelism": 1, "completions": 1}
        assert engine.scale(ScaleOrder(2, frozenset(range(4)))) == "Job worker goes from parallelism 1 to 4"
        assert engine.scale(ScaleOrder(2, frozenset(range(4)))) == "Job worker has parallelism 4 already"
        with pytest.raises(InvalidRequest, match=r"is not given as many pods; expected: at most 4: --engine-most"):
            engine.scale(ScaleOrder(3, frozenset(range(5))))
        api.status = 403
        with pytest.raises(InvalidRequest, match="give the coordinator's account a Role"):
            engine.scale(ScaleOrder(3, frozenset({0})))
    assert api.job["spec"] == {"parallelism": 4, "completions": 4}


def test_a_job_that_somebody_else_changes_meanwhile_stays_as_it_is(tmp_path: Path) -> None:
    api = FakeApi(parallelism=3)
    api.before_patch = lambda: api.job["metadata"].update(resourceVersion="8")
    with served(api, tmp_path) as account, pytest.raises(Unavailable, match="refuses PATCH"):
        KubernetesJob("worker", account, most=8).request(4, ())
    assert api.job["spec"] == {"parallelism": 3}


@pytest.mark.parametrize(
    ("status", "body", "error", "text"),
    [
        (403, b"", InvalidRequest, "refuses GET"),
        (404, b"", InvalidRequest, "refuses GET"),
        (500, b"", Unavailable, "refuses GET"),
        (200, b"no JSON", Unavailable, "does not answer"),
        (200, b"[]", InvalidRequest, "no Job"),
        (200, b'{"kind": "Job", "spec": {"parallelism": "many"}}', InvalidRequest, "strange spec.parallelism"),
        (200, b'{"kind": "Job", "spec": {}, "status": 3}', InvalidRequest, "strange status.active"),
    ],
)
def test_a_bad_answer_is_an_error(tmp_path: Path, status: int, body: bytes, error: type[PsError], text: str) -> None:
    api = FakeApi(parallelism=3)
    api.status, api.body = status, body
    with served(api, tmp_path) as account, pytest.raises(error, match=text):
        KubernetesJob("worker", account, most=8).request(4, ())


def test_an_api_that_is_away_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    account = Account(f"http://127.0.0.1:{free_port()}", "training", tmp_path / "token")
    with pytest.raises(Unavailable, match="does not answer"):
        KubernetesJob("worker", account, most=8).request(4, ())
    (tmp_path / "token").unlink()
    with pytest.raises(Unavailable, match="cannot be read"):
        KubernetesJob("worker", account, most=8).request(4, ())


def test_the_account_of_a_pod(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs the account of a pod"):
        Account.of_pod({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path)
    (tmp_path / "namespace").write_text("training\n")
    with pytest.raises(ConfigError, match="does not find the API"):
        Account.of_pod({}, tmp_path)
    account = Account.of_pod({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}, tmp_path)
    assert account == Account("https://[fd00::1]:6443", "training", tmp_path / "token", tmp_path / "ca.crt")
    with pytest.raises(ConfigError, match="name of a Job"):
        KubernetesJob("../secrets", account, most=1)


def test_a_file_holds_the_last_request(tmp_path: Path) -> None:
    engine = find_engine(f"file:{tmp_path / 'request'}", 4)
    engine.request(4, (1, 2))
    assert engine.request(3, ()) == f"request 2 is in {tmp_path / 'request'}"
    assert json.loads((tmp_path / "request").read_text()) == {"number": 2, "workers": 3, "ranks": []}
    assert engine.describe() == f"the reader of {tmp_path / 'request'}"
    engine.scale(ScaleOrder(1, frozenset({0, 1}), frozenset({0, 1, 2})))
    engine.request(2, (1,))
    told = {"number": 4, "workers": 2, "ranks": [1], "run": {"workers": [0, 1], "shards": [0, 1, 2]}}
    assert json.loads((tmp_path / "request").read_text()) == told
    engine.scale(ScaleOrder(1, frozenset({1}), done_ranks=frozenset({0})))
    assert json.loads((tmp_path / "request").read_text())["run"] == {"workers": [1], "done": [0]}
    assert [each.name for each in tmp_path.iterdir()] == ["request"]
    with pytest.raises(Unavailable, match="cannot be written"):
        RequestFile(tmp_path / "none" / "request").request(1, ())


class Own:
    def request(self, wanted: int, ranks: tuple[int, ...]) -> str:
        return f"{wanted} {ranks}"

    def describe(self) -> str:
        return "my engine"


class NoEngine:
    pass


def test_a_class_of_the_users_own_is_an_engine() -> None:
    assert find_engine(f"{__name__}:Own", 4).request(3, (1,)) == "3 (1,)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kubernetes", "not understood"),
        ("file:", "not understood"),
        (":Own", "not understood"),
        ("no.such.module:Own", "cannot be made"),
        (f"{__name__}:Missing", "cannot be made"),
        (f"{__name__}:NoEngine", "is no engine"),
        ("kubernetes:worker", "needs the account of a pod"),
    ],
)
def test_an_engine_that_cannot_be_found_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_engine(text, 4)
