"""The trace: what the engine did and when, kept in bounded memory and written for Perfetto and ``streamflow trace``."""
