"""Generated messages and stubs of version 1 of the protocol (``make proto`` writes them)."""
