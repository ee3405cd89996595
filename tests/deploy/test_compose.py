"""The image and the compose file, read without an engine: they name what exists."""

import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from ps_protocol.security.certificates import read_certificates
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.settings import SecuritySettings
from ps_server.cli.options.storage import StorageOptions
from ps_server.coordinator.config import configure
from ps_server.entry import MODULES
from ps_server.settings import configured

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


def services(file: str = "compose.yaml", **environment: str) -> dict[str, dict[str, Any]]:
    """The file's services as compose reads them with this environment: ${NAME:-default}, ${NAME-default}."""

    def value(match: re.Match[str]) -> str:
        given = environment.get(match["name"])
        return match["default"] if given is None or (match["colon"] and not given) else given

    text = (ROOT / "deploy" / file).read_text()
    text = re.sub(r"\$\{(?P<name>\w+)(?P<colon>:?)-(?P<default>[^}]*)}", value, text)
    found: dict[str, dict[str, Any]] = yaml.safe_load(text.replace("$$", "$"))["services"]
    return found


def secured_services(**environment: str) -> dict[str, dict[str, Any]]:
    """Those of compose.yaml with compose.tls.yaml over them: mappings and volumes are added, all else is replaced."""
    merged = services(**environment)
    for name, service in services("compose.tls.yaml", **environment).items():
        merged[name] = over(merged.get(name, {}), service)
    return merged


def over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    made = {**below, **above}
    for name in below.keys() & above.keys():
        if isinstance(below[name], dict):
            made[name] = over(below[name], above[name])
        elif name == "volumes":
            made[name] = below[name] + above[name]
    return made


def parsed(service: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the service's program makes of its command line and environment. Raises click.UsageError."""
    for name in [name for name in os.environ if name.startswith("PS_")]:
        monkeypatch.delenv(name)
    for name, value in service["environment"].items():
        monkeypatch.setenv(name, value)
    program, *arguments = service["command"]
    command: click.Command = importlib.import_module(MODULES[program]).main
    return command.make_context(program, arguments, **command.context_settings).params


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ({}, "async"),
        ({"MODE": "async"}, "async"),
        ({"MODE": "ssp", "STALENESS": "4"}, "ssp(4)"),
        ({"MODE": "sync"}, "sync"),
        ({"STALE_POLICY": "scale", "STALE_THRESHOLD": "8"}, "async, scale above 8"),
        ({"MODE": "ssp", "STALENESS": "4", "STALE_POLICY": "reject"}, "ssp(4), reject above the number of workers"),
    ],
)
def test_the_coordinator_accepts_its_flags_and_takes_the_mode_from_the_environment(environment, mode, monkeypatch):
    found = services(**environment)
    options = parsed(found["coordinator"], monkeypatch)
    config = configure(options, given=set(), kept=None)
    assert str(config.cluster.consistency) == mode
    assert config.cluster.expected_shards == sum(name.startswith("shard") for name in found)
    assert config.cluster.expected_workers == sum(name.startswith("worker") for name in found)


def test_each_shard_has_its_number_and_the_address_others_dial(monkeypatch):
    found = services()
    for number in (0, 1):
        options = parsed(found[f"shard{number}"], monkeypatch)
        assert (options["shard"], options["coordinator"]) == (number, "coordinator:7000")
        assert options["advertise"] == f"shard{number}:{options['port']}"


@pytest.mark.parametrize("durability", ["", "snapshot"])
def test_servers_keep_their_state_in_a_volume_that_they_find_again_and_are_started_again(durability, monkeypatch):
    found = services(**({"DURABILITY": durability} if durability else {}))
    for name in ("coordinator", "shard0", "shard1"):
        options = parsed(found[name], monkeypatch)
        assert f"state:{options['data_dir']}" in found[name]["volumes"]
        assert found[name]["restart"] == "on-failure:10"
    for name in ("shard0", "shard1"):
        options = parsed(found[name], monkeypatch)
        config = configured(StorageOptions, options).config()
        assert config.durability.value == (durability or "durable")
    # A new volume has the owner that its place has in the image.
    assert re.search(r"install --directory --owner torch-ps .*/state\b", DOCKERFILE)


def test_without_state_the_coordinator_has_no_journal_and_no_server_comes_back_empty(monkeypatch):
    found = services(DURABILITY="memory", STATE="", RESTART_SERVERS="no")
    assert parsed(found["coordinator"], monkeypatch)["data_dir"] is None
    for name in ("coordinator", "shard0", "shard1"):
        assert found[name]["restart"] == "no"
    assert parsed(found["shard0"], monkeypatch)["durability"] == "memory"


def test_health_checks_ask_the_port_that_the_server_listens_on(monkeypatch):
    for name in ("coordinator", "shard0", "shard1"):
        service = services()[name]
        port = parsed(service, monkeypatch)["port"]
        assert service["healthcheck"]["test"] == ["CMD", "python", "-m", "ps_server.health", f"localhost:{port}"]


def test_workers_run_an_example_of_the_image_with_flags_that_it_has():
    for rank in (0, 1):
        worker = services()[f"worker{rank}"]
        program, script, *arguments = worker["command"]
        assert program == "python"
        source = (ROOT / script).read_text()
        assert [flag for flag in arguments if flag.startswith("--") and f'"{flag}"' not in source] == []
        others = {"OMP_NUM_THREADS": "1", "NUMBA_CACHE_DIR": "/compiled"}
        assert worker["environment"] == {"PS_COORDINATOR": "coordinator:7000", "PS_RANK": str(rank), **others}


def test_what_is_compiled_stays_in_a_volume_and_workers_write_nothing_that_servers_load():
    volumes = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["volumes"]
    for name, service in secured_services().items():
        if not name.startswith(("shard", "worker")):
            continue
        # Else it would be compiled again at each start: the rest of the container is memory.
        folder = service["environment"]["NUMBA_CACHE_DIR"]
        (volume,) = [each.partition(":")[0] for each in service["volumes"] if each.endswith(f":{folder}")]
        assert volume == ("compiled-servers" if name.startswith("shard") else "compiled-workers")
        assert volume in volumes
        assert re.search(rf"install --directory --owner torch-ps .*{folder}\b", DOCKERFILE)


def test_the_image_is_built_once_never_pulled_and_nothing_is_published():
    found = services()
    assert [name for name, service in found.items() if "build" in service] == ["coordinator"]
    assert {service["image"] for service in found.values()} == {"torch-ps"}
    assert {name for name, service in found.items() if service["pull_policy"] != "never"} == {"coordinator"}
    assert not any("ports" in service for service in found.values())


def test_the_dockerfile_needs_no_frontend_of_its_own_and_ends_as_an_ordinary_user():
    assert "syntax=" not in DOCKERFILE
    instructions = [line.split() for line in DOCKERFILE.splitlines() if re.match(r"[A-Z]+ ", line)]
    assert {source for instruction, source, *_ in instructions if instruction == "FROM"} == {
        "${BASE_IMAGE}",
        "dependencies",
    }
    # Before the first stage, so that every FROM sees it.
    assert instructions[0] == ["ARG", "BASE_IMAGE=python:3.11-slim"]
    digest = "python:3.11-slim@sha256:0123"
    assert services()["coordinator"]["build"]["args"] == {"BASE_IMAGE": "python:3.11-slim"}
    assert services(BASE_IMAGE=digest)["coordinator"]["build"]["args"] == {"BASE_IMAGE": digest}
    assert [user for instruction, user, *_ in instructions if instruction == "USER"][-1] != "root"
    assert ["STOPSIGNAL", "SIGTERM"] in instructions


def test_the_image_has_the_extras_of_every_program_in_it():
    (extras,) = re.findall(r"for extra in \(([^)]*)\)", DOCKERFILE)
    named = re.findall(r'"(\w+)"', extras)
    assert named == ["server", "worker", "page", "examples"]
    assert set(named) <= PYPROJECT["project"]["optional-dependencies"].keys()


def test_everything_the_dockerfile_copies_is_let_into_the_build():
    admitted = {
        line[1:].partition("/")[0]
        for line in (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {
        source.replace("wheel[s]", "wheels")
        for line in DOCKERFILE.splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    assert copied == admitted


def test_no_container_has_more_rights_memory_or_processes_than_it_needs():
    for service in secured_services().values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["read_only"] is True
        assert service["tmpfs"] == ["/tmp"]
        assert service["pids_limit"] == 512
        assert service["mem_limit"] == "4g"
    assert services(MEMORY="1g")["worker0"]["mem_limit"] == "1g"


SERVERS = {"coordinator": "coordinator", "shard0": "shard-0", "shard1": "shard-1"}


@pytest.fixture(scope="module")
def issued(tmp_path_factory) -> Path:
    """What the service certs leaves in its volumes, after it has run twice. Four short processes: 3 s of CPU."""
    folder = tmp_path_factory.mktemp("issue")
    certs = secured_services()["certs"]
    for volume in certs["volumes"]:
        (folder / volume.partition(":")[2].removeprefix("/issue/")).mkdir()
    shell, flag, script = certs["command"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for _ in range(2):
        subprocess.run([shell, flag, script.replace("/issue", str(folder))], env={"PATH": path}, check=True)
    return folder


def volume_of(service: dict[str, Any]) -> str:
    """Its certificates'."""
    (found,) = [volume for volume in service["volumes"] if volume.endswith(":/certs:ro")]
    return found.partition(":")[0].removeprefix("certs-")


def test_with_tls_no_server_is_insecure_and_each_has_its_own_certificate(issued, monkeypatch):
    found = secured_services()
    for name, certificate in SERVERS.items():
        assert "--insecure" not in found[name]["command"]
        assert volume_of(found[name]) == name
        place = issued / name
        assert {each.name for each in place.iterdir()} == {
            "ca.pem",
            "tokens",
            f"{certificate}.pem",
            f"{certificate}.key",
        }
        options = dict(
            found[name],
            environment={key: value.replace("/certs", str(place)) for key, value in found[name]["environment"].items()},
        )
        for variable, value in options["environment"].items():
            monkeypatch.setenv(variable, value)
        settings = SecuritySettings.from_environment(options["environment"])
        assert settings.require_client
        security = Security(settings, AccessRole.SERVER, listens=True)
        security.check_bind("0.0.0.0", name)
        (facts, *_) = read_certificates((place / f"{certificate}.pem").read_bytes(), name)
        # Under the name by which others reach it, and that of its health check.
        assert {name, "localhost"} <= set(facts.hosts)
        assert parsed(options, monkeypatch)["bind"] == "0.0.0.0"


def test_with_tls_a_worker_has_a_certificate_and_the_token_of_its_role_alone(issued):
    found = secured_services()
    for name in ("worker0", "worker1"):
        assert found[name]["environment"]["PS_COORDINATOR"] == "coordinator:7000"
        assert volume_of(found[name]) == "worker"
        environment = {
            key: value.replace("/certs", str(issued / "worker")) for key, value in found[name]["environment"].items()
        }
        security = Security(SecuritySettings.from_environment(environment), AccessRole.WORKER)
        assert security.tls
        token = security.show().token
        assert token is not None
        assert token.role is AccessRole.WORKER
    assert "admin" not in (issued / "worker" / "worker.token").read_text()


def test_nobody_but_the_service_that_makes_certificates_has_the_key_of_the_authority(issued):
    found = secured_services()
    holders = [name for name, each in found.items() if any(v.startswith("authority:") for v in each.get("volumes", ()))]
    assert holders == ["certs"]
    assert found["certs"]["network_mode"] == "none"
    assert [each.parent.name for each in issued.rglob("ca.key")] == ["authority"]
    assert all(each.stat().st_mode & 0o077 == 0 for each in issued.rglob("*.key"))
    for name, service in found.items():
        if name != "certs":
            assert service["depends_on"]["certs"] == {"condition": "service_completed_successfully"}


def test_the_volumes_of_certificates_belong_to_the_user_of_the_image():
    made = re.search(r"--mode 0700 (/issue .*)", DOCKERFILE)
    assert made
    places = {volume.partition(":")[2] for volume in secured_services()["certs"]["volumes"]}
    assert places | {"/issue"} == set(made[1].split())


def test_with_tls_the_same_program_runs_it():
    text = (ROOT / "deploy" / "up.sh").read_text()
    assert "COMPOSE_FILE=compose.yaml:compose.tls.yaml" in text
    # The service that ends first does not end the job.
    assert re.search(r"exited:0:worker\* \| exited:0:certs\)", text)
