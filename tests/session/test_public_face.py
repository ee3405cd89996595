"""The SDK's public names, and what they do without a cluster."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

import ps_worker
from ps_protocol.errors import ConfigError


def test_the_public_names_are_exactly_these() -> None:
    assert sorted(ps_worker.__all__) == [
        "Cluster",
        "ConfigError",
        "Fenced",
        "ModelMismatch",
        "NonFiniteGradient",
        "Optimizer",
        "PsError",
        "StateLost",
        "Unavailable",
        "UnsupportedOptimizer",
        "connect",
    ]
    assert all(getattr(ps_worker, name) is not None for name in ps_worker.__all__)


def test_every_public_error_is_caught_as_ps_error() -> None:
    errors = [value for name in ps_worker.__all__ if isinstance(value := getattr(ps_worker, name), type)]
    for error in errors:
        if issubclass(error, Exception):
            assert issubclass(error, ps_worker.PsError)


def test_connecting_without_any_setting_tells_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PS_COORDINATOR", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="ps-run"):
        ps_worker.connect()


def test_importing_the_sdk_configures_no_logging() -> None:
    code = "import logging, ps_worker; print(logging.root.handlers, logging.getLogger('ps_worker').handlers)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[] []"
    assert logging.getLogger("ps_worker").propagate


@pytest.mark.parametrize(("given", "kept"), [({}, "0"), ({"GRPC_ENABLE_FORK_SUPPORT": "1"}, "1")])
def test_grpc_fork_handlers_are_off_unless_the_user_wants_them(given: dict[str, str], kept: str) -> None:
    code = "import ps_worker, os; print(os.environ['GRPC_ENABLE_FORK_SUPPORT'])"
    environ = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"} | given
    assert subprocess.check_output([sys.executable, "-c", code], text=True, env=environ).strip() == kept
