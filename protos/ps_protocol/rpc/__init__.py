"""gRPC between the processes of a cluster: channel settings, and failed calls as typed errors."""
