"""The Kubernetes manifests, without a cluster: valid for three versions and as Kubeflow's models, and fit together.

About 5 s of CPU, most of it for reading schemas.
"""

from __future__ import annotations

import copy
import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import all_versions
from packaging.version import Version

from tests.deploy.manifests import (
    ALL,
    JOB_SETS,
    OVERLAYS,
    RENDERED,
    ROOT,
    SECURED,
    SOURCES,
    Document,
    Pod,
    documents,
    each_pod,
    expanded,
    found,
    job_set,
    pods,
)
from tests.support.length import few

NEWEST = sorted(set(all_versions()), key=Version)[-3:]

#: The class of ``kubeflow_trainer_api.models`` of each custom resource.
CUSTOM = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "ClusterTrainingRuntime": "TrainerV1alpha1ClusterTrainingRuntime",
}

SERVERS = ("coordinator", "shard", "standby")

#: The pod to copy a model from.
FETCH: Document = yaml.safe_load((SOURCES / "fetch.yaml").read_text())

PAGE = (ROOT / "docs" / "kubernetes.md").read_text()

#: What a JobSet controller of 0.11 to 0.12 with its default feature gates does with a Job that has failed, and what it
#: refuses: the enum of FailurePolicyRule.action in api/jobset/v1alpha2/jobset_types.go and the gates in
#: pkg/features/features.go of kubernetes-sigs/jobset, tags v0.11.1 and v0.12.0. 0.11 does not know the second two; 0.12
#: has them behind the gate RestartJob, which is alpha and off, also on its main branch in August 2026.
ENABLED_ACTIONS = {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"}
GATED_ACTIONS = {"RestartJob", "RestartJobAndIgnoreMaxRestarts"}


def plain_documents(name: str) -> Iterator[Document]:
    """Those that every API server knows; the Jobs in a JobSet as Jobs."""
    for document in documents(name):
        if document["kind"] not in {*CUSTOM, "PodMonitor"}:
            yield document
    if name not in OVERLAYS:
        for each in job_set(name)[1]["replicatedJobs"]:
            spec = each["template"]["spec"]
            yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": each["name"]}, "spec": spec}


def check_custom(document: Document) -> None:
    """Raises ValueError, of pydantic too, for what Kubeflow's models do not have."""
    from kubeflow_trainer_api import models  # takes a second, and every test process collects this file

    made = getattr(models, CUSTOM[document["kind"]]).from_dict(document).to_dict()
    # The models drop keys they do not know, and fill in this one.
    if differences := list(different(document, made)):
        raise ValueError(f"not in the model: {differences}")


def different(given: Any, made: Any, path: str = "") -> Iterator[str]:
    if isinstance(given, dict) and isinstance(made, dict):
        for key in given.keys() | made.keys():
            if not (path.endswith("/grpc") and key == "service" and key not in given):
                yield from different(given.get(key), made.get(key), f"{path}/{key}")
    elif isinstance(given, list) and isinstance(made, list) and len(given) == len(made):
        for number, (one, other) in enumerate(zip(given, made, strict=True)):
            yield from different(one, other, f"{path}/{number}")
    elif given != made:
        yield path


# -- what is rendered is what the sources say


def test_the_rendered_manifests_are_made_of_these_sources():
    files = [path for path in SOURCES.rglob("*.yaml") if RENDERED not in path.parents]
    named = sorted(f"./{path.relative_to(SOURCES)}" for path in files)
    sums = "".join(f"{hashlib.sha256((SOURCES / name).read_bytes()).hexdigest()}  {name}\n" for name in named)
    sources = hashlib.sha256(sums.encode()).hexdigest()
    assert {path.stem for path in RENDERED.iterdir()} == set(ALL)
    for path in RENDERED.iterdir():
        first, _, _ = path.read_text().partition("\n")
        assert first.endswith(f", sources {sources}"), f"{path.name} is old: make manifests"


@pytest.mark.parametrize("name", ALL)
def test_kustomize_renders_them_again(name):
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed; the rendered manifests are compared with their sources by checksum")
    folder = SOURCES / (name if (SOURCES / name).is_dir() else f"overlays/{name}")
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True)
    assert list(yaml.safe_load_all(done.stdout)) == documents(name)


# -- valid


@pytest.mark.parametrize("version", few(reversed(NEWEST)))
def test_every_manifest_is_valid_for_the_newest_three_versions_of_kubernetes(version):
    # Most are the same in several overlays.
    every = [FETCH, *(each for name in ALL for each in plain_documents(name))]
    different_ones = {yaml.dump(each, Dumper=yaml.CSafeDumper): each for each in every}
    for document in different_ones.values():
        kubernetes_validate.validate(document, version, strict=True)
    kinds = {document["kind"] for document in different_ones.values()}
    assert kinds == {
        *("Service", "StatefulSet", "Job", "NetworkPolicy", "PodDisruptionBudget", "PersistentVolumeClaim", "Pod"),
        *("ServiceAccount", "Role", "RoleBinding"),
    }


@pytest.mark.parametrize("name", JOB_SETS)
def test_custom_resources_are_what_kubeflows_models_have(name):
    custom = [document for document in documents(name) if document["kind"] in CUSTOM]
    for document in custom:
        check_custom(document)
    assert len(custom) == (1 if name.startswith("jobset") else 2)


def renamed(document: Document, path: str, to: str) -> Document:
    """A copy in which the last key of ``path`` is called ``to``."""
    made = copy.deepcopy(document)
    *above, last = path.split("/")
    place: Any = made
    for each in above:
        place = place[int(each)] if isinstance(place, list) else place[each]
    place[to] = place.pop(last)
    return made


@pytest.mark.parametrize(
    ("kind", "name", "path"),
    [
        ("StatefulSet", "shard", "spec/volumeClaimTemplates"),
        ("StatefulSet", "shard", "spec/template/spec/terminationGracePeriodSeconds"),
        ("StatefulSet", "shard", "spec/template/spec/containers/0/readinessProbe/grpc"),
        ("StatefulSet", "coordinator", "spec/template/spec/containers/0/securityContext/readOnlyRootFilesystem"),
        ("Job", "worker", "spec/backoffLimitPerIndex"),
        ("Job", "worker", "spec/podFailurePolicy/rules/0/onPodConditions"),
        ("NetworkPolicy", "torch-ps-servers", "spec/ingress/0/from"),
        ("PodDisruptionBudget", "torch-ps-servers", "spec/maxUnavailable"),
    ],
)
def test_a_typo_is_not_valid(kind, name, path):
    document = renamed(found("base", kind, name), path, f"{path.rpartition('/')[2]}s")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, NEWEST[-1], strict=True)


@pytest.mark.parametrize(
    ("name", "kind", "path"),
    [
        ("jobset", "JobSet", "spec/failurePolicy/rules/0/targetReplicatedJobs"),
        ("jobset", "JobSet", "spec/network/enableDNSHostnames"),
        ("jobset", "JobSet", "spec/replicatedJobs/1/template/spec/template/spec/containers/0/volumeMounts"),
        ("kubeflow", "ClusterTrainingRuntime", "spec/mlPolicy/numNodes"),
        ("kubeflow", "TrainJob", "spec/runtimeRef"),
        ("kubeflow", "TrainJob", "spec/trainer/args"),
    ],
)
def test_a_typo_in_a_custom_resource_is_not_what_the_models_have(name, kind, path):
    (document,) = [each for each in documents(name) if each["kind"] == kind]
    with pytest.raises(ValueError):
        check_custom(renamed(document, path, f"{path.rpartition('/')[2]}Of"))


# -- the parts fit each other


@pytest.mark.parametrize("name", ALL)
def test_the_coordinator_expects_as_many_shards_and_workers_as_there_are(name):
    made = pods(name)
    (coordinator,) = [pod for pod in made if pod.component == "coordinator"]
    shards = [pod for pod in made if pod.component == "shard"]
    workers = [pod for pod in made if pod.component == "worker"]
    assert coordinator.environment["PS_COORDINATOR_SHARDS"] == str(len(shards))
    # 0: any number, where the manifests do not know it.
    unknown = dict.fromkeys(("spot", "kubeflow", "kubeflow-tls"), "0")
    expected = {**unknown, "elastic": f"{len(workers)}:16"}.get(name, str(len(workers)))
    assert coordinator.environment["PS_COORDINATOR_WORKERS"] == expected
    assert [pod.environment["PS_SERVER_SHARD"] for pod in shards] == [str(n) for n in range(len(shards))]
    assert [pod.environment["PS_RANK"] for pod in workers] == [str(n) for n in range(len(workers))]
    assert len({pod.environment["PS_LINEAGE"] for pod in workers}) == len(workers)


@pytest.mark.parametrize("name", ALL)
def test_every_address_is_a_name_and_a_port_of_a_pod(name):
    made = pods(name)
    ports = {
        f"{host}:{port['containerPort']}": pod.name
        for pod in made
        for host in pod.hosts
        for port in pod.container.get("ports", [{"containerPort": number} for number in (7000, 7001)])
    }
    for pod in made:
        if pod.component == "coordinator":
            continue
        assert "coordinator" in ports[pod.environment["PS_COORDINATOR"]]
        if pod.component != "worker":
            assert ports[pod.environment["PS_SERVER_ADVERTISE"]] == pod.name


@pytest.mark.parametrize("name", OVERLAYS)
def test_services_and_containers_have_the_same_ports(name):
    for document in documents(name):
        if document["kind"] != "Service":
            continue
        (template,) = {
            yaml.safe_dump(each["spec"]["template"])
            for each in documents(name)
            if each["kind"] == "StatefulSet"
            and document["spec"]["selector"].items() <= each["spec"]["template"]["metadata"]["labels"].items()
        }
        (container,) = yaml.safe_load(template)["spec"]["containers"]
        has = {each["name"]: each["containerPort"] for each in container["ports"]}
        for port in document["spec"]["ports"]:
            assert has[port["name"]] == port["port"]


@pytest.mark.parametrize("pod", each_pod())
def test_volumes_that_are_mounted_exist_and_those_that_exist_are_mounted(pod: Pod):
    there = {*pod.claims, *(each["name"] for each in pod.spec.get("volumes", ()))}
    mounted = {each["name"] for each in pod.container["volumeMounts"]}
    # The claims of a JobSet are those of all its pods.
    assert mounted <= there
    assert there - mounted <= set(pod.claims)
    if pod.component in SERVERS:
        folder = pod.environment.get("PS_SERVER_DATA_DIR") or pod.environment["PS_COORDINATOR_DATA_DIR"]
        assert folder in [each["mountPath"] for each in pod.container["volumeMounts"]]


#: Those with a volume for what the script saves.
SAVES = ("dev", "durable", *JOB_SETS)


@pytest.mark.parametrize("name", ALL)
def test_what_a_worker_saves_is_in_a_volume_that_stays(name):
    (worker, *_) = [pod for pod in pods(name) if pod.component == "worker"]
    command = list(worker.command)
    if name.startswith("kubeflow"):
        (job,) = [each for each in documents(name) if each["kind"] == "TrainJob"]
        assert job["spec"]["trainer"]["args"][-2:] == command[-2:]
    assert ("--save" in command) == (name in SAVES)
    if name not in SAVES:
        return
    folder = command[command.index("--save") + 1].rpartition("/")[0]
    (volume,) = [each["name"] for each in worker.container["volumeMounts"] if each["mountPath"] == folder]
    (source,) = [each for each in worker.spec["volumes"] if each["name"] == volume]
    claim = found(name, "PersistentVolumeClaim", source["persistentVolumeClaim"]["claimName"])
    # Workers are on several nodes, but in dev.
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce" if name == "dev" else "ReadWriteMany"]
    # The pod that copies files has the same claim at the same place.
    assert source in FETCH["spec"]["volumes"]
    (mount,) = FETCH["spec"]["containers"][0]["volumeMounts"]
    assert mount == {"name": volume, "mountPath": folder, "readOnly": True}
    assert f"kubectl cp fetch:{folder}/digits.pt" in PAGE


def test_the_pod_that_copies_files_has_the_rights_of_a_worker():
    worker = found("base", "Job", "worker")["spec"]["template"]["spec"]
    assert FETCH["spec"]["securityContext"] == worker["securityContext"]
    (container,) = FETCH["spec"]["containers"]
    assert container["securityContext"] == worker["containers"][0]["securityContext"]
    assert FETCH["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", ALL)
def test_volumes_that_stay_are_removed_by_the_label_of_the_job_and_no_others(name):
    removed = re.findall(r"kubectl delete pvc (.*?)(?: {2,}#.*)?$", PAGE, re.MULTILINE)
    assert removed
    (label,) = {each.removeprefix("-l ") for each in removed}
    key, _, value = label.partition("=")
    for document in documents(name):
        if document["kind"] == "PersistentVolumeClaim":
            assert document["metadata"]["labels"][key] == value
        if document["kind"] == "StatefulSet":
            # Claims of its templates have the labels of its selector.
            assert document["spec"]["selector"]["matchLabels"][key] == value


@pytest.mark.parametrize("pod", each_pod())
def test_every_pod_is_admitted_where_the_restricted_standard_is_enforced(pod: Pod):
    security = pod.spec["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] == 1000
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    # A change of owners at each start would open session.key to the group.
    assert security["fsGroupChangePolicy"] == "OnRootMismatch"
    assert pod.container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert re.search(r"useradd .*--uid 1000 torch-ps", (ROOT / "deploy" / "Dockerfile").read_text())
    assert pod.spec["enableServiceLinks"] is False
    # One asks the API for pods.
    asks = "PS_COORDINATOR_ENGINE" in pod.environment
    assert pod.spec["automountServiceAccountToken"] is asks
    assert ("serviceAccountName" in pod.spec) is asks
    assert {"cpu", "memory"} <= pod.container["resources"]["requests"].keys()
    assert "memory" in pod.container["resources"]["limits"]


@pytest.mark.parametrize("pod", each_pod())
def test_pods_of_a_lost_node_go_before_workers_have_waited_too_long(pod: Pod):
    keys = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    toleration = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
    # Without them Kubernetes adds 300 s.
    assert [each for each in pod.spec["tolerations"] if each["key"] in keys] == [
        {"key": key, **toleration} for key in keys
    ]
    if pod.component == "worker":
        # Until Kubernetes notices (node-monitor-grace-period), the toleration, until the volume is taken from the node
        # (maxWaitForUnmountDuration); the rest is for the start.
        away = 50 + toleration["tolerationSeconds"] + 360
        assert float(pod.environment["PS_RECONNECT_TIMEOUT"]) >= 2 * away


@pytest.mark.parametrize("name", OVERLAYS)
def test_nobody_but_the_job_reaches_servers_and_one_server_is_drained_at_a_time(name):
    policy = found(name, "NetworkPolicy", "torch-ps-servers")["spec"]
    budget = found(name, "PodDisruptionBudget", "torch-ps-servers")["spec"]
    assert budget["maxUnavailable"] == 1
    # Else a server that cannot start keeps its node from being drained.
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    for selector in (policy["podSelector"], budget["selector"]):
        assert selector["matchExpressions"] == [
            {"key": "app.kubernetes.io/component", "operator": "In", "values": list(SERVERS)}
        ]
    admitted = {entry["ports"][0]["port"]: entry["from"] for entry in policy["ingress"]}
    assert admitted[7000] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "torch-ps"}}}]
    assert policy["ingress"][0]["ports"] == [{"protocol": "TCP", "port": 7000, "endPort": 7002}]
    assert list(admitted) == [7000, 7009]
    assert found(name, "NetworkPolicy", "torch-ps-workers")["spec"].get("ingress") is None


@pytest.mark.parametrize("name", ALL)
def test_only_those_without_tls_trust_everybody_who_reaches_them(name):
    secured = name in SECURED
    for pod in pods(name):
        environment = pod.environment
        assert ("PS_TLS_CA" in environment) == secured
        if pod.component in SERVERS:
            assert ("PS_INSECURE" in environment) != secured
            assert ("PS_TLS_REQUIRE_CLIENT" in environment) == secured


def test_a_standby_is_a_shard_in_all_but_its_name_its_place_and_its_disk():
    (of_shard, of_standby) = (found("durable", "StatefulSet", name) for name in ("shard", "standby"))
    affinity = of_standby["spec"]["template"]["spec"].pop("affinity")
    # On another node than its own shard, always: that of the same index.
    assert affinity == {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {
                    "topologyKey": "kubernetes.io/hostname",
                    "labelSelector": {"matchLabels": of_shard["spec"]["selector"]["matchLabels"]},
                    "matchLabelKeys": ["apps.kubernetes.io/pod-index"],
                }
            ]
        }
    }
    text = yaml.safe_dump(of_standby).replace("standbys", "shards").replace("standby", "shard")
    assert without_order(yaml.safe_load(text)) == without_order(of_shard)
    for pod in pods("durable"):
        if pod.component in ("shard", "standby"):
            assert pod.environment["PS_SERVER_STANDBY"] == "1"


def without_order(document: Any) -> Any:
    """Lists as sets: a patch puts what it adds first."""
    if isinstance(document, dict):
        return {key: without_order(value) for key, value in document.items()}
    if isinstance(document, list):
        return sorted((without_order(each) for each in document), key=repr)
    return document


def failure_rules(document: Any) -> Iterator[Document]:
    """Every rule of a failure policy in ``document``, wherever it stands."""
    if isinstance(document, dict):
        if "failurePolicy" in document:
            yield from document["failurePolicy"].get("rules", ())
        for value in document.values():
            yield from failure_rules(value)
    elif isinstance(document, list):
        for value in document:
            yield from failure_rules(value)


def refused_actions(manifests: Any) -> set[str]:
    """Actions in ``manifests`` that a controller with default gates refuses."""
    return {rule["action"] for rule in failure_rules(manifests)} - ENABLED_ACTIONS


def test_no_manifest_has_a_failure_action_that_a_job_set_controller_refuses_by_default():
    every = [documents(name) for name in ALL]
    assert refused_actions(every) == set()
    assert len(list(failure_rules(every))) >= 4
    # What other manifests may have, too: sources that are not rendered.
    for path in SOURCES.rglob("*.yaml"):
        assert not any(re.search(rf"action:\s*\"?{each}\b(?!Set)", path.read_text()) for each in GATED_ACTIONS), path


@pytest.mark.parametrize("action", sorted(GATED_ACTIONS))
def test_a_failure_action_behind_a_feature_gate_is_noticed(action):
    document = found("jobset", "JobSet", "torch-ps")
    document["spec"]["failurePolicy"]["rules"][1]["action"] = action
    assert refused_actions([document]) == {action}


@pytest.mark.parametrize("name", JOB_SETS)
def test_in_a_job_set_the_end_of_a_worker_restarts_no_shard(name):
    _, spec = job_set(name)
    jobs = {each["name"]: each["template"]["spec"] for each in spec["replicatedJobs"]}
    (worker,) = set(jobs) - {"coordinator", "shard"}
    # What happens to a Job that has failed: the first rule that names it, else all are started again.
    actions = {
        job: next(
            (rule["action"] for rule in spec["failurePolicy"]["rules"] if job in rule["targetReplicatedJobs"]),
            "RestartJobSet",
        )
        for job in jobs
    }
    assert actions == {worker: "FailJobSet", "coordinator": "RestartJobSet", "shard": "RestartJobSet"}
    # A server that ends fails no Job: its Job starts it again, alone.
    for server in ("coordinator", "shard"):
        assert jobs[server]["template"]["spec"]["restartPolicy"] == "OnFailure"
        assert jobs[server]["backoffLimit"] == 1000
    assert jobs[worker]["backoffLimitPerIndex"] == 10
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": [worker]}
    if name.startswith("kubeflow"):
        (node,) = [each for each in spec["replicatedJobs"] if each["name"] == worker]
        labels = node["template"]["metadata"]["labels"]
        assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
        assert node["template"]["spec"]["template"]["spec"]["containers"][0]["name"] == "node"


@pytest.mark.parametrize("name", ["jobset-tls", "kubeflow-tls"])
def test_a_job_set_has_tls_as_the_overlays_do(name):
    of_jobs = {pod.component: pod for pod in pods(name)}
    of_sets = {pod.component: pod for pod in pods("tls")}
    for component in ("coordinator", "shard", "worker"):
        one, other = of_jobs[component], of_sets[component]
        for own in (one, other):
            listed = own.container["env"]
            own.container["env"] = [each for each in listed if each["name"].startswith(("PS_TLS", "PS_TOKEN"))]
        assert without_order(one.container["env"]) == without_order(other.container["env"])
        secret = [
            [each for each in pod.spec["volumes"] if "secret" in each]
            + [each for each in pod.container["volumeMounts"] if each["name"] in ("certs", "keys")]
            for pod in (one, other)
        ]
        assert without_order(secret[0]) == without_order(secret[1])
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert one.container.get(probe, {}).get("exec") == other.container.get(probe, {}).get("exec")
    of_set, of_runtime = (
        (SOURCES / folder / "tls.yaml").read_text().partition("\n")[2] for folder in ("jobset-tls", "kubeflow-tls")
    )
    assert of_set.replace("/spec/replicatedJobs", "/spec/template/spec/replicatedJobs") == of_runtime


def test_the_coordinator_may_change_the_job_of_the_workers_and_nothing_else():
    (coordinator, *_) = [pod for pod in pods("elastic") if pod.component == "coordinator"]
    engine, _, job = coordinator.environment["PS_COORDINATOR_ENGINE"].partition(":")
    assert (engine, found("elastic", "Job", job)["spec"]["completionMode"]) == ("kubernetes", "Indexed")
    (role,) = [each for each in documents("elastic") if each["kind"] == "Role"]
    # What KubernetesJob calls: GET and PATCH.
    allowed = {"apiGroups": ["batch"], "resources": ["jobs"], "resourceNames": [job], "verbs": ["get", "patch"]}
    assert role["rules"] == [allowed]
    (binding,) = [each for each in documents("elastic") if each["kind"] == "RoleBinding"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    account = {"kind": "ServiceAccount", "name": coordinator.spec["serviceAccountName"]}
    assert binding["subjects"] == [account]
    assert found("elastic", "ServiceAccount", account["name"])
    assert not any(pod.spec.get("serviceAccountName") for pod in pods("elastic") if pod.component != "coordinator")
    # As many as the job may have, and a rank for each.
    _, _, most = coordinator.environment["PS_COORDINATOR_WORKERS"].partition(":")
    assert coordinator.environment["PS_COORDINATOR_ENGINE_MOST"] == most
    assert all(pod.environment["PS_SERVER_ADD"] == "1" for pod in pods("elastic") if pod.component == "shard")


def test_prometheus_reads_every_server_and_nothing_else():
    monitor = found("monitored", "PodMonitor", "torch-ps")["spec"]
    assert monitor["selector"] == found("base", "PodDisruptionBudget", "torch-ps-servers")["spec"]["selector"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    for pod in pods("monitored"):
        ports = {each["name"] for each in pod.container.get("ports", ())}
        assert (endpoint["port"] in ports) == (pod.component in SERVERS)
    # Certificates have the names of servers, and not the addresses of their pods.
    assert (endpoint["scheme"], endpoint["tlsConfig"]["serverName"]) == ("https", "localhost")
    plain = yaml.safe_load((SOURCES / "components" / "monitoring" / "pod-monitor.yaml").read_text())
    assert "scheme" not in plain["spec"]["podMetricsEndpoints"][0]


def test_a_reference_to_a_variable_that_comes_later_is_noticed():
    pod = pods("tls")[1]
    listed = pod.container["env"]
    assert pod.environment["PS_SERVER_ADVERTISE"] == "shard-0.shards:7001"
    moved = copy.deepcopy(pod.spec)
    moved["containers"][0]["env"] = sorted(listed, key=lambda each: each["name"] != "PS_SERVER_ADVERTISE")
    with pytest.raises(AssertionError, match="POD_NAME is not defined before"):
        _ = Pod(pod.name, pod.component, moved, pod.labels).environment
    assert expanded("$$(A) $(A)", {"A": "b"}) == "$(A) b"
