"""Reading the newest parameters and rows without training."""
