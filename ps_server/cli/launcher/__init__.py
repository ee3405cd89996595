"""ps-run: one job's processes on one machine, from start to a clean end."""
