"""Which samples a worker trains: fixed shares, or leases that the coordinator hands out."""
