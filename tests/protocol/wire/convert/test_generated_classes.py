"""Generated classes are named where messages are made, read or converted; everything else knows dataclasses."""

import re
from pathlib import Path

import pytest

import ps_protocol
import ps_server
import ps_worker

#: Folders and modules that may name generated classes, by their path below the packages' parent.
CONVERTS = (
    "ps_protocol/v1/",
    "ps_protocol/wire/",
    # Callers of stubs.
    "ps_protocol/client/coordinator.py",
    "ps_protocol/client/connection.py",
    "ps_protocol/client/model_status.py",
    "ps_protocol/client/row_loader.py",
    "ps_protocol/client/worker_requests.py",
    "ps_protocol/rpc/client_errors.py",
    "ps_protocol/feed/",
    "ps_protocol/weights/",
    "ps_server/coordinator/jobs/quiesce.py",
    "ps_server/shard/transfer.py",
    "ps_server/shard/peers.py",
    "ps_worker/step/shard_calls.py",
    # Faces of services.
    "ps_server/coordinator/service.py",
    "ps_server/coordinator/jobs/declaring.py",
    "ps_server/shard/service.py",
    "ps_server/shard/rows_service.py",
    "ps_server/shard/change_feed.py",
    "ps_server/shard/weights.py",
    "ps_server/relay/service.py",
    "ps_server/relay/held.py",
    "ps_server/shard/standby/log_feed.py",
    "ps_server/shard/standby/follower.py",
    # gRPC's own health service.
    "ps_server/serving/grpc_server.py",
    # What is on disk, and what goes from a shard to disk and to other shards as it is.
    "ps_server/log/",
    "ps_server/checkpoint/messages.py",
    "ps_server/consistency/tracker_state.py",
)


def naming(package: object) -> list[str]:
    """The modules of ``package`` that import generated classes."""
    root = Path(package.__path__[0])  # type: ignore[attr-defined]
    files = (path for path in root.rglob("*.py") if re.search(r"\b\w+_pb2\b", path.read_text()))
    return sorted(path.relative_to(root.parent).as_posix() for path in files)


@pytest.mark.parametrize("package", [ps_protocol, ps_server, ps_worker], ids=lambda package: package.__name__)
def test_no_other_module_names_a_generated_class(package: object) -> None:
    found = naming(package)
    assert found
    assert [path for path in found if not path.startswith(CONVERTS)] == []


def test_every_exception_is_still_one() -> None:
    found = [path for package in (ps_protocol, ps_server, ps_worker) for path in naming(package)]
    assert [each for each in CONVERTS if not any(path.startswith(each) for path in found)] == []
