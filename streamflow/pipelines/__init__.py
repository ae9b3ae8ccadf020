"""Whole pipelines: which components there are, what each does while the offload is open, and what pipelines declare."""
