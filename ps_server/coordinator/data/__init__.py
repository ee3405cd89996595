"""Which worker trains which items of a dataset: leases on ranges of it."""
