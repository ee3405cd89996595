"""The control plane as its clients use it: calls to the coordinator, and membership kept alive by threads."""
