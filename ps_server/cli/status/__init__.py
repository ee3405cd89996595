"""How the status of a cluster is shown to people."""
