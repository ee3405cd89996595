"""The job at a glance: what the page, ps-run and psctl show of a job, made of what the coordinator knows.

Pure: ``glance_of`` in ``job`` turns a JobHistory into a JobGlance; ``workers``, ``shards``, ``publications`` and
``alerts`` make its parts, and ``terminal`` draws it. ``ps_protocol.cluster.job_state`` decides in which state a job and
its members are.
"""
