"""The SDK's public names, and what they do without a cluster."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import subprocess
import sys

import pytest
import torch

import ps_worker
from ps_protocol.errors import ConfigError
from tests.worker.jobs import running_job

PUBLIC = """
    Cluster ConfigError DamagedData Fenced InternalError InvalidRequest ModelMismatch ModelMoved
    ModelReleased NonFiniteGradient NotReady Optimizer Outcome PermissionDenied PlaceTaken
    ProtocolVersionMismatch PsError Refused Retryable StateLost StepSummary StorageFull Strategy TableFull
    Unauthenticated Unavailable UnknownModel UnknownShard UnknownVersion UnsupportedOptimizer Version VersionGone
    admin connect feed files optimizers rows security strategy subscribe tables
"""

OF_A_CLUSTER = """
    adopt all_gather all_reduce barrier broadcast close convert_embeddings device embedding embedding_bag
    embedding_bags files follow gather_values optimizer prefetch publish rank report role scale seed set_mode shard
    world_size
"""

OF_AN_OPTIMIZER = """
    assign clip_grad_norm close finish last name pull step_was_skipped version
"""


def test_the_public_names_are_exactly_these() -> None:
    assert sorted(ps_worker.__all__) == PUBLIC.split()
    assert all(getattr(ps_worker, name) is not None for name in ps_worker.__all__)
    assert dir(ps_worker) == sorted({*ps_worker.__all__, "__version__"})


def public(value: object) -> set[str]:
    return {name for name in dir(value) if not name.startswith("_")}


def test_what_users_hold_has_users_methods_only() -> None:
    with running_job(workers=1) as job:
        cluster = job.cluster()
        parameter = torch.nn.Parameter(torch.zeros(2))
        optimizer = cluster.optimizer(torch.optim.SGD, [parameter], lr=1.0)
        torchs_own = public(torch.optim.SGD([parameter], lr=1.0))
        assert sorted(public(optimizer) - torchs_own) == OF_AN_OPTIMIZER.split()
        assert sorted(public(cluster)) == OF_A_CLUSTER.split()


def test_the_version_is_that_of_the_package() -> None:
    assert ps_worker.__version__ == importlib.metadata.version("torch-ps")


def test_every_public_error_is_caught_as_ps_error() -> None:
    errors = [value for name in ps_worker.__all__ if isinstance(value := getattr(ps_worker, name), type)]
    for error in errors:
        if issubclass(error, Exception):
            assert issubclass(error, ps_worker.PsError)


def test_connecting_without_any_setting_tells_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PS_COORDINATOR", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="ps-run"):
        ps_worker.connect(local=False)


IMPORTS = """
import json, logging, os, sys, torch
for given in sys.argv[1:]:
    if not os.fork():
        for name in ("GRPC_ENABLE_FORK_SUPPORT", "GRPC_VERBOSITY"):
            os.environ.pop(name, None)
        os.environ |= json.loads(given)
        import ps_worker
        handlers = logging.root.handlers + logging.getLogger("ps_worker").handlers
        grpc_settings = [os.environ["GRPC_ENABLE_FORK_SUPPORT"], os.environ["GRPC_VERBOSITY"]]
        said = [grpc_settings, len(handlers), "numba" in sys.modules]
        print(json.dumps([given, *said]), flush=True)
        os._exit(0)
    os.wait()
"""
"""Imports the SDK once per argument, an environment, each time in a process that has imported nothing but torch."""

UNSET, WANTED = "{}", '{"GRPC_ENABLE_FORK_SUPPORT": "1", "GRPC_VERBOSITY": "DEBUG"}'


@pytest.fixture(scope="module")
def imported() -> dict[str, tuple[list[str], int, bool]]:
    """By environment, after the import: gRPC's settings, the number of log handlers, and numba's presence."""
    said = subprocess.check_output([sys.executable, "-c", IMPORTS, UNSET, WANTED], text=True)
    return {given: tuple(rest) for given, *rest in map(json.loads, said.splitlines())}


def test_importing_the_sdk_configures_no_logging(imported: dict[str, tuple[list[str], int, bool]]) -> None:
    assert imported[UNSET][1] == 0
    assert logging.getLogger("ps_worker").propagate


def test_the_compiler_is_loaded_when_the_first_table_is_used(imported: dict[str, tuple[list[str], int, bool]]) -> None:
    assert not imported[UNSET][2]


@pytest.mark.parametrize(("given", "kept"), [(UNSET, ["0", "ERROR"]), (WANTED, ["1", "DEBUG"])])
def test_grpc_has_no_fork_handlers_and_logs_errors_alone_unless_the_user_wants_otherwise(
    imported: dict[str, tuple[list[str], int, bool]], given: str, kept: list[str]
) -> None:
    assert imported[given][0] == kept
