"""What a reading was made on."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

import streamflow


def environment(device: torch.device) -> dict[str, Any]:
    """Hardware and versions, without anything that names the machine."""
    found: dict[str, Any] = {
        "streamflow": streamflow.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.system(),
        "num_cores": len(os.sched_getaffinity(0)),
        "device": str(device),
    }
    if device.type == "cuda":
        found["device_name"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
    return found
