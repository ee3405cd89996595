"""The format of checkpoint files: manifest, parts, tensors, rows, and their validation."""
