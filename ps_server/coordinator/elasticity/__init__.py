"""Detects slow or lost workers and overloaded shards, and corrects them.

``policy`` decides, without I/O, from a ``JobLook`` and the time, with limits and hysteresis. ``runner`` owns the
policy: once a heartbeat it observes the job, logs every decision, moves slices and requests workers. ``engines`` start
workers: a file that ``ps-run`` or another program reads, a Job of Kubernetes, or a user's class.
"""
