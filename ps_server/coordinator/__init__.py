"""The coordinator: membership with leases, placement of models, the consistency mode, barriers. No tensors."""
