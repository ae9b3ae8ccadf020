"""The streaming engine."""
