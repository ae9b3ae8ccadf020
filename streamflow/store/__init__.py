"""The host weight store: one immutable copy of a model's final weights for all processes of a node."""
