"""ps-run --slurm: each task of srun runs its own ps-run, which owns the processes of that task and no others.

``tasks.py`` decides without I/O which processes a task has and where the coordinator is. ``task_supervisor.py`` decides
when they are started, signalled and restarted. ``job.py`` has the options and runs them.
"""
