"""Transfers: how a block image gets from its source into a slot."""
