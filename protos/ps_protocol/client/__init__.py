"""The client side of the control plane: calls to the coordinator, and membership kept alive by threads."""
