"""The rendered Kubernetes manifests, read: pods, what a kubelet makes of their environment, what is made of Secrets."""

from __future__ import annotations

import base64
import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "deploy" / "k8s"
RENDERED = SOURCES / "rendered"

#: Those of plain Kubernetes.
OVERLAYS = ("base", "dev", "tls", "spot", "gpu", "durable", "elastic", "monitored")
#: Those with custom resources: JobSet, and Kubeflow's.
JOB_SETS = ("jobset", "jobset-tls", "kubeflow", "kubeflow-tls")
ALL = (*OVERLAYS, *JOB_SETS)
#: Those with certificates and tokens.
SECURED = ("tls", "spot", "gpu", "durable", "elastic", "monitored", "jobset-tls", "kubeflow-tls")

Document = dict[str, Any]

_REFERENCE = re.compile(r"\$\$|\$\((\w+)\)")


def documents(name: str) -> list[Document]:
    return copy.deepcopy(_parsed(name))


@cache
def _parsed(name: str) -> list[Document]:
    return list(yaml.load_all((RENDERED / f"{name}.yaml").read_text(), yaml.CSafeLoader))


def found(name: str, kind: str, called: str) -> Document:
    """The one document of this kind and name."""
    (document,) = [each for each in documents(name) if (each["kind"], each["metadata"]["name"]) == (kind, called)]
    return document


def job_set(name: str) -> tuple[str, Document]:
    """Name and spec of the JobSet; of Kubeflow's runtime, as it is for the TrainJob."""
    if name.startswith("jobset"):
        return "torch-ps", found(name, "JobSet", "torch-ps")["spec"]
    (job,) = [each for each in documents(name) if each["kind"] == "TrainJob"]
    runtime = found(name, "ClusterTrainingRuntime", job["spec"]["runtimeRef"]["name"])
    return job["metadata"]["name"], runtime["spec"]["template"]["spec"]


@dataclass(frozen=True)
class Pod:
    """One pod with its one container, as its controller makes it."""

    name: str
    #: coordinator, shard, standby or worker.
    component: str
    spec: Document
    #: Its own, beside those of the template.
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    #: Names under which others reach it.
    hosts: tuple[str, ...] = ()
    #: Names of volumes that stay when the pod is replaced.
    claims: tuple[str, ...] = ()

    @property
    def container(self) -> Document:
        (container,) = self.spec["containers"]
        return container

    @property
    def command(self) -> list[str]:
        environment = self.environment
        return [expanded(each, environment) for each in [*self.container["command"], *self.container.get("args", ())]]

    @property
    def environment(self) -> dict[str, str]:
        """As the kubelet makes it: a reference is replaced where the variable stands before it in the list."""
        made: dict[str, str] = {}
        for each in self.container.get("env", ()):
            made[each["name"]] = self._read(each["valueFrom"]) if "valueFrom" in each else expanded(each["value"], made)
        return made

    def _read(self, source: Document) -> str:
        if "resourceFieldRef" in source:
            kind, _, resource = source["resourceFieldRef"]["resource"].partition(".")
            return str(whole(self.container["resources"][kind][resource]))
        path = source["fieldRef"]["fieldPath"]
        if path == "metadata.name":
            return self.name
        match = re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path)
        assert match, path
        return (self.labels if match[1] == "labels" else self.annotations)[match[2]]


def whole(quantity: str) -> int:
    """Cores, rounded up: what a reference to a resource gives."""
    return -(-int(quantity.removesuffix("m")) // 1000) if quantity.endswith("m") else int(quantity)


def expanded(text: str, environment: Mapping[str, str]) -> str:
    """As Kubernetes does; a reference to what is not there, which stays as it is, fails."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        assert match[1] in environment, f"{text}: {match[1]} is not defined before"
        return environment[match[1]]

    return _REFERENCE.sub(value, text)


def pods(name: str) -> list[Pod]:
    """All pods of the overlay."""
    if name in JOB_SETS:
        return list(_set_pods(*job_set(name)))
    made: list[Pod] = []
    for document in documents(name):
        if document["kind"] == "StatefulSet":
            made += _stateful(name, document)
        elif document["kind"] == "Job":
            made += _indexed(document["metadata"]["name"], document["spec"], "worker", {}, ())
    return made


@cache
def _each_pod() -> list[tuple[str, Pod]]:
    return [(name, pod) for name in ALL for pod in pods(name)]


def each_pod(*components: str) -> list[Any]:
    """Parameters: the pods of all overlays, of ``components`` where some are given. Tests do not change them."""
    return [
        pytest.param(pod, id=f"{name}-{pod.name}")
        for name, pod in _each_pod()
        if not components or pod.component in components
    ]


def _stateful(name: str, document: Document) -> Iterator[Pod]:
    spec = document["spec"]
    template = spec["template"]
    labels = template["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    for number in range(spec["replicas"]):
        pod = f"{document['metadata']['name']}-{number}"
        services = [each for each in documents(name) if each["kind"] == "Service"]
        own = [each for each in services if each["spec"]["selector"].items() <= labels.items()]
        hosts = [
            f"{pod}.{each['metadata']['name']}" if each["spec"].get("clusterIP") == "None" else each["metadata"]["name"]
            for each in own
        ]
        assert f"{pod}.{spec['serviceName']}" in hosts
        yield Pod(
            pod,
            labels["app.kubernetes.io/component"],
            template["spec"],
            {"apps.kubernetes.io/pod-index": str(number)},
            hosts=tuple(hosts),
            claims=tuple(each["metadata"]["name"] for each in spec["volumeClaimTemplates"]),
        )


def _indexed(
    job: str, spec: Document, component: str, labels: Mapping[str, str], claims: Sequence[str], subdomain: str = ""
) -> Iterator[Pod]:
    assert spec["completionMode"] == "Indexed"
    for number in range(spec["completions"]):
        yield Pod(
            f"{job}-{number}",
            component,
            spec["template"]["spec"],
            labels,
            {"batch.kubernetes.io/job-completion-index": str(number)},
            (f"{job}-{number}.{subdomain}",) if subdomain else (),
            tuple(claims),
        )


def _set_pods(name: str, spec: Document) -> Iterator[Pod]:
    labels = {"jobset.sigs.k8s.io/jobset-name": name}
    claims = [each["metadata"]["name"] for policy in spec["volumeClaimPolicies"] for each in policy["templates"]]
    for each in spec["replicatedJobs"]:
        component = each["template"]["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
        for number in range(each["replicas"]):
            job = f"{name}-{each['name']}-{number}"
            yield from _indexed(job, each["template"]["spec"], component, labels, claims, subdomain=name)


def written_secrets(text: str, folder: Path) -> None:
    """Each Secret in ``text`` as a folder of its name, as a kubelet mounts it: files of root that a group may read.

    Where the tests are not run by root, files of theirs that they alone may read.
    """
    mode = 0o400 if os.geteuid() else 0o440
    for secret in yaml.safe_load_all(text):
        mounted = folder / secret["metadata"]["name"]
        # What is mounted is a link to a folder of links, exchanged whole when the Secret changes.
        data = mounted / "..2026_11_22"
        data.mkdir(parents=True)
        (mounted / "..data").symlink_to(data.name)
        for name, value in secret["data"].items():
            (data / name).write_bytes(base64.b64decode(value))
            (data / name).chmod(mode)
            (mounted / name).symlink_to(f"..data/{name}")
