"""``torch.optim`` classes over parameter arenas, the state they keep, and how contributions of workers are combined."""
