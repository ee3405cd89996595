"""ps-run --slurm: node lists, layouts and the supervision of a task; jobs of a real Slurm where it is installed."""
