"""Makes draft heads: data from the target itself, training, export in the published formats."""
