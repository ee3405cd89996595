"""The coordinator: membership with leases, placement of models, the consistency mode, barriers. No tensors.

``ClusterState`` decides, without I/O; its parts are in ``membership`` and ``placement``. ``DataLeases`` decides which
worker trains which samples, ``Exchanges`` when a collective is complete. ``Driver`` owns all three, ``Publisher`` the
journal and the view that members receive. ``jobs`` has the coroutines beside the driver, ``elasticity`` the handling of
slow workers and hot shards.
"""
