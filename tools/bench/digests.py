"""Digests of outputs, for claims of byte equality."""

from __future__ import annotations

import hashlib

import torch


def digest_of(tensor: torch.Tensor) -> str:
    """The SHA-256 of the tensor's bytes, row by row."""
    flat = tensor.detach().cpu().contiguous().view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()
