"""Reserves resources of a Ray cluster as placement groups, within a time limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ps_protocol.errors import Unavailable
from ps_worker.ray.plan import Amounts, asked, fits_never, had


class Reservation:
    """One placement group. Owned by the cluster or the run that made it, which releases it."""

    def __init__(self, bundles: Sequence[Amounts], strategy: str, whose: str, timeout_seconds: float) -> None:
        """Wait until Ray has reserved ``bundles``. Raises Unavailable, which says what was asked for and what there is.

        A request that Ray could never meet waits as well: a cluster may grow.
        """
        self._bundles = bundles
        self._group = placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
        try:
            if not self._group.wait(timeout_seconds):
                raise _too_few(bundles, strategy, whose, timeout_seconds)
        except BaseException:
            self.release()
            raise

    def options(self, bundle: int) -> dict[str, Any]:
        """Of an actor in ``bundle`` that has all of it."""
        strategy = PlacementGroupSchedulingStrategy(self._group, bundle)
        return {**options_of(self._bundles[bundle]), "scheduling_strategy": strategy}

    def release(self) -> None:
        """Give the resources back; Ray kills what is still in them."""
        remove_placement_group(self._group)


def options_of(bundle: Amounts) -> dict[str, Any]:
    """Of an actor that needs ``bundle``: it begins when a node has it free."""
    amounts = dict(bundle)
    return {
        "num_cpus": amounts.pop("CPU", 0),
        "num_gpus": amounts.pop("GPU", 0),
        "memory": amounts.pop("memory", None),
        "resources": amounts,
    }


def node_addresses() -> list[str]:
    """Of each live node of the Ray cluster."""
    return [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]


def _too_few(bundles: Sequence[Amounts], strategy: str, whose: str, timeout_seconds: float) -> Unavailable:
    total, free = ray.cluster_resources(), ray.available_resources()
    never = fits_never(bundles, total)
    return Unavailable(
        f"Ray did not reserve resources for {whose} within {timeout_seconds:g} s"
        + (f": the cluster has too little {' and '.join(never)}" if never else ""),
        expected=asked(bundles, strategy),
        actual=had(bundles, total, free, len(node_addresses())),
        remedy="ask for less in RayCluster(), add nodes to the Ray cluster, or end what uses it",
    )
