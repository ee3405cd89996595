"""Data types of a cluster: view, status of models, data leases, addresses, TF_CONFIG."""
