"""Notices workers that are slow or lost and shards that are busier than others, and does something about it.

``policy`` decides, pure: from a ``JobLook`` and the time, with limits and hysteresis; ``hot_shards`` is its part for
shards. ``look`` makes the ``JobLook`` of the status. ``runner`` looks once a heartbeat, tells every decision, and has
moves made and workers asked for; it owns the policy.
``engines`` are asked for workers: a file that ``ps-run`` or a program reads, a Job of Kubernetes, or a user's class.
"""
