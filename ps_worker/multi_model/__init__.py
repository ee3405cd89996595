"""Several models in one job: steps without gradients, and deadlocks between models avoided."""
