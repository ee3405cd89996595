"""Small collectives among workers, over the coordinator. ``Collectives`` owns the numbers of a worker's exchanges."""
