"""The plan: what of a model on disk would stream, from the headers of its files alone."""
