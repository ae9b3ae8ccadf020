"""Weights on the host: checkpoints, their preflight, and the pieces of block images that they hold."""
