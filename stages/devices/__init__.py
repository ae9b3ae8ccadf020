"""Devices: what the engine needs of an accelerator, and the backends that provide it."""
