"""Binding: pointing a module's tensors at device memory, and keeping others from misreading them meanwhile."""
