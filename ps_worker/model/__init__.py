"""From a torch model and optimizer to what the cluster declares, and back."""
