"""Jobs in a Ray cluster (extra ``ray``): servers and workers as actors.

``plan.py`` decides, without Ray. ``actors.py`` runs in Ray's processes. In the driver, ``placement.py`` reserves
resources, ``servers.py`` owns the server actors and the thread that starts lost ones again, ``workers.py`` owns the
worker actors of one ``run``, and ``cluster.py`` owns both.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ps_worker.ray.cluster import RayCluster

__all__ = ["RayCluster"]


def __getattr__(name: str) -> Any:
    """Imports ``RayCluster`` at its first use: the modules that decide need no Ray."""
    if name == "RayCluster":
        from ps_worker.ray.cluster import RayCluster

        return RayCluster
    raise AttributeError(f"module 'ps_worker.ray' has no attribute '{name}'")
