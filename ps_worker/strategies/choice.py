"""Which strategy a process is meant for when its script names none: pure."""

from __future__ import annotations

from collections.abc import Mapping

from ps_protocol.cluster.replicas import STRATEGY_VARIABLE
from ps_protocol.cluster.tf_config import TfConfig


def chosen_name(environ: Mapping[str, str]) -> str:
    """``PS_STRATEGY``, else what the other variables are for, else one_device. Raises ConfigError for TF_CONFIG."""
    if environ.get(STRATEGY_VARIABLE):
        return environ[STRATEGY_VARIABLE]
    if environ.get("TF_CONFIG"):
        tf = TfConfig.parse(environ["TF_CONFIG"], needs_ps=False)
        return "parameter_server" if tf.cluster.get("ps") else "multi_worker_mirrored"
    if environ.get("PS_COORDINATOR"):
        return "parameter_server"
    if environ.get("WORLD_SIZE") and environ.get("RANK"):
        return "multi_worker_mirrored"
    return "one_device"
