"""What a program that starts a job waits for, and for how long; more of it is in ``ps_protocol.times``."""

from __future__ import annotations

GRACE_SECONDS = 5.0
"""Scripts have so long between SIGTERM and SIGKILL. Servers of a Slurm task outlive them by as much, so that the
workers of all tasks can leave."""
INTERRUPT_GRACE_SECONDS = 30.0
"""Scripts have so long after Ctrl-C to save their work; a second Ctrl-C ends it."""
SERVER_GRACE_SECONDS = 60.0
"""Coordinator and shards have so long to end: on a busy machine it takes many seconds, and a last snapshot is worth it.
So has an evaluator after the last worker, and a process that ends because the job is to have fewer."""
LATE_START_SECONDS = 30.0
"""A coordinator that does not serve yet is named after so long, and given up after ``STARTS_SECONDS``."""

TASK_GRACE_SECONDS = 20.0
"""Servers of a Slurm task then have so long: together that is below Slurm's usual KillWait of 30 s."""
