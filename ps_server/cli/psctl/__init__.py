"""The command psctl: look at a running job, change it, handle its checkpoints."""
