"""Notices workers that are slow or lost and shards that are busier than others, and does something about it.

``policy`` decides, pure: from a ``JobLook`` and the time, with limits and hysteresis. ``runner`` owns the policy, looks
at the job once a heartbeat, logs every decision, moves slices and requests workers. ``engines`` start workers: a file
that ``ps-run`` or another program reads, a Job of Kubernetes, or a user's class.
"""
