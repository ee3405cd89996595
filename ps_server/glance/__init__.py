"""The job at a glance: what the page, ``psctl top`` and ``psctl report`` show, made of what the coordinator knows.

Pure: ``glance_of`` in ``job`` turns a JobHistory into a JobGlance, and ``workers``, ``shards`` and ``alerts`` are its
parts. In what state the job and its members are, ``ps_protocol.cluster.job_state`` decides. Nothing is owned here.
"""
