"""The state of models: Replica owns values and optimizer state, ModelState adds tracker and staged reshard."""
