"""The command psctl: inspect and change a running job, and manage its checkpoints."""
