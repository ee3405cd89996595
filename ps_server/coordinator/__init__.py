"""The coordinator: membership with leases, placement of models, the consistency mode, barriers. No tensors.

``ClusterState`` decides, without I/O; its parts are in ``membership`` and ``placement``. ``DataLeases`` in ``data``
decides which worker trains which samples. ``Driver`` owns both, ``Publisher`` the journal and the view that is told.
``jobs`` has the coroutines that work beside the driver, ``elasticity`` what looks after slow workers and hot shards.
"""
