"""Ranks: processes that each bring a part of every block and gather the rest from each other."""
