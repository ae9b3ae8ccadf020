"""Hand-made safetensors files, broken ones among them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

WriteRaw = Callable[..., Path]


def raw_file(header: dict[str, Any] | bytes, payload: bytes = b"") -> bytes:
    """The bytes of a file with any header whatever; the length field is right."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + payload


@pytest.fixture
def write_raw(tmp_path: Path) -> WriteRaw:
    """Writes a file with the given header and payload and returns its path."""

    def write(header: dict[str, Any] | bytes, payload: bytes = b"", name: str = "hand-made.safetensors") -> Path:
        path = tmp_path / name
        path.write_bytes(raw_file(header, payload))
        return path

    return write


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Writes tensors with the stock writer and returns the path."""

    def write(tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path)
        return path

    return write


@pytest.fixture
def open_fds() -> Callable[[], set[str]]:
    """What the open descriptors of this process stand for."""

    def targets() -> set[str]:
        found = set()
        for fd in os.listdir("/proc/self/fd"):
            try:
                found.add(os.readlink(f"/proc/self/fd/{fd}"))
            except FileNotFoundError:
                continue  # the descriptor of the listing itself
        return found

    return targets
