"""Click prediction: a generated stream with a known truth, the Criteo file format, two models, and their training."""
