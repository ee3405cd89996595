"""Each defined metric is asserted by a test of causes: something happens in a component, and this number changes."""

import ast
from pathlib import Path

from ps_protocol.metrics.definition import PREFIX
from tests.support.metrics_page import CATALOGUES

TESTS = Path(__file__).parents[2]

CAUSES = (
    "protocol/metrics/test_common.py",
    "protocol/metrics/test_server.py",
    "coordinator/test_metrics.py",
    "shard/test_metrics.py",
    "weights/test_relay.py",
    "shard/standby/test_lag.py",
    "shard/standby/test_served_metrics.py",
    "worker/session/test_worker_metrics.py",
)
"""Where these tests are."""

DEFINED = sorted(metric.name.removeprefix(PREFIX) for catalogue in CATALOGUES for metric in catalogue.own)


def named(path: Path) -> set[str]:
    """Names that a test compares: the first string of a key ``(name, *labels)``, not of a list of names."""
    keys = [
        node.elts[0]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Tuple) and node.elts and isinstance(node.ctx, ast.Load)
    ]
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def test_each_metric_is_asserted_where_its_cause_happens():
    asserted = {name for path in CAUSES for name in named(TESTS / path)}
    missing = [name for name in DEFINED if name not in asserted]
    assert not missing, f"add causes to one of {CAUSES}"
