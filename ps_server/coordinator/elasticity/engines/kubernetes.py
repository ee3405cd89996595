"""Asks the API of Kubernetes for more pods of a Job, with the account of the coordinator's pod."""

from __future__ import annotations

import json
import os
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ps_protocol import times
from ps_protocol.cluster.scaling import ScaleOrder
from ps_protocol.errors import ConfigError, InvalidRequest, Unavailable
from ps_server.coordinator.elasticity.engines.base import WORKERS

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its token, its namespace and the certificate of the API."""

_MOST_ANSWER_BYTES = 4 << 20
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Account:
    """The address of the API, and the credentials."""

    url: str
    namespace: str
    #: Read at each request: tokens are replaced while a pod runs.
    token_file: Path
    #: None: the connection is not encrypted, as in tests.
    authority_file: Path | None = None

    @classmethod
    def of_pod(cls, environment: Mapping[str, str], folder: Path = ACCOUNT) -> Account:
        """The account of this pod. Raises ConfigError outside of one, and where no token is mounted."""
        host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
        try:
            namespace = (folder / "namespace").read_text().strip()
        except OSError as error:
            raise ConfigError(
                "--engine kubernetes needs the account of a pod",
                expected=f"{folder} with a token",
                actual=str(error),
                remedy="set automountServiceAccountToken: true, with a Role that may get and patch the Job "
                "(docs/elasticity.md)",
            ) from error
        if not host:
            raise ConfigError(
                "--engine kubernetes does not find the API", expected="KUBERNETES_SERVICE_HOST", actual="not set"
            )
        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{port}", namespace, folder / "token", folder / "ca.crt")


class KubernetesJob:
    """The engine ``kubernetes:JOB``: raises parallelism and completions of the Job JOB, ``most`` pods at most.

    Pods that the Job is about to start are counted, so a repeated request changes nothing. An index of an Indexed Job
    that has used up its ``backoffLimitPerIndex`` stays failed; the new pod has a new index, and takes the free rank
    when the script's rank is not set by the index.
    """

    scales = frozenset({WORKERS})
    by_count = True

    def __init__(self, job: str, account: Account, most: int) -> None:
        """Raises ConfigError for an invalid name of a Job."""
        if not _NAME.fullmatch(job):
            raise ConfigError("--engine kubernetes:JOB needs the name of a Job", actual=job or "nothing")
        self._path = f"/apis/batch/v1/namespaces/{account.namespace}/jobs/{job}"
        self._job, self._account, self._most = job, account, most

    def request(self, wanted: int, ranks: tuple[int, ...]) -> str:
        """Scale the Job. Raises Unavailable, InvalidRequest for an answer that is no Job or one that is refused."""
        job = self._call("GET", None)
        parallelism, active = _number(job, "spec", "parallelism", 1), _number(job, "status", "active", 0)
        ended = _number(job, "status", "failed", 0)
        more = min(wanted - active, self._most - parallelism)
        if wanted <= active:
            return f"Job {self._job} has {active} active pods already"
        if more <= 0:
            return f"Job {self._job} stays at parallelism {parallelism}: that is the limit"
        self._set(job, parallelism + more, _number(job, "spec", "completions", 1) + more)
        failed = f", {ended} pods have failed" if ended else ""
        return f"Job {self._job} goes from parallelism {parallelism} to {parallelism + more}{failed}"

    def scale(self, order: ScaleOrder) -> str:
        """Set parallelism, and completions of an Indexed Job, to the workers of ``order``. Raises as ``request``.

        In an Indexed Job the highest indexes end; otherwise Kubernetes chooses.
        """
        wanted = len(order.ranks or ())
        if wanted > self._most:
            raise InvalidRequest(
                f"Job {self._job} is not given as many pods",
                expected=f"at most {self._most}: --engine-most",
                actual=str(wanted),
            )
        job = self._call("GET", None)
        parallelism = _number(job, "spec", "parallelism", 1)
        if parallelism == wanted:
            return f"Job {self._job} has parallelism {wanted} already"
        self._set(job, wanted, wanted)
        return f"Job {self._job} goes from parallelism {parallelism} to {wanted}"

    def _set(self, job: Mapping[str, Any], parallelism: int, completions: int) -> None:
        spec: dict[str, Any] = {"parallelism": parallelism}
        if job.get("spec", {}).get("completions") is not None:
            # In an Indexed Job both change together (elastic indexed Jobs, Kubernetes 1.27).
            spec["completions"] = completions
        # The version makes it fail if the Job has changed meanwhile.
        version = job.get("metadata", {}).get("resourceVersion")
        self._call("PATCH", {"spec": spec} | ({"metadata": {"resourceVersion": version}} if version else {}))

    def describe(self) -> str:
        """The Job and its namespace."""
        return f"Job {self._job} in namespace {self._account.namespace} of Kubernetes"

    def _call(self, method: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        account = self._account
        try:
            token = account.token_file.read_text().strip()
            context = ssl.create_default_context(cafile=account.authority_file) if account.authority_file else None
        except OSError as error:
            raise Unavailable(f"the account of the pod cannot be read: {error}") from error
        request = urllib.request.Request(  # https, or http in tests, from Account
            account.url + self._path,
            data=json.dumps(body).encode() if body is not None else None,
            method=method,
            headers={
                "Authorization": f"Bearer {token}",
                "Accept": "application/json",
                "Content-Type": "application/merge-patch+json",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=times.CALL_SECONDS, context=context) as reply:
                answer = json.loads(reply.read(_MOST_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            raise self._refused(method, error) from error
        except (OSError, ValueError) as error:
            raise Unavailable(f"the API of Kubernetes does not answer: {error}", actual=account.url) from error
        if not isinstance(answer, dict) or answer.get("kind") != "Job":
            raise InvalidRequest("the API of Kubernetes answers with something that is no Job", actual=account.url)
        return answer

    def _refused(self, method: str, error: urllib.error.HTTPError) -> InvalidRequest | Unavailable:
        what = f"Kubernetes refuses {method} of Job {self._job} in namespace {self._account.namespace}"
        if error.code in (401, 403):
            remedy = "give the coordinator's account a Role with get and patch of jobs (docs/elasticity.md)"
            return InvalidRequest(what, actual=f"status {error.code}", remedy=remedy)
        if error.code == 404:
            return InvalidRequest(what, actual="no such Job", remedy="correct --engine kubernetes:JOB")
        return Unavailable(what, actual=f"status {error.code}", remedy="it is tried again")


def _number(job: Mapping[str, Any], part: str, name: str, default: int) -> int:
    """A number of the Job. Raises InvalidRequest if it is not one."""
    fields = job.get(part) or {}
    value = fields.get(name, default) if isinstance(fields, dict) else None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidRequest(f"the Job has a strange {part}.{name}", expected="a number", actual=str(value))
    return value


def kubernetes_job(job: str, most: int) -> KubernetesJob:
    """The engine of this pod. Raises ConfigError."""
    return KubernetesJob(job, Account.of_pod(os.environ), most)
