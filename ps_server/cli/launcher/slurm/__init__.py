"""ps-run --slurm: each task of srun runs its own ps-run, which owns the processes of that task and no others.

``node_list.py`` and ``tasks.py`` decide without I/O which processes a task has and where the coordinator is;
``task_supervisor.py`` decides when they are started, signalled and restarted; ``job.py`` has them run.
"""
