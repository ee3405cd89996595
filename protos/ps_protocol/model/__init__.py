"""What a model is to the cluster: variables, groups, tables, optimizers, and the layout both sides compute."""
