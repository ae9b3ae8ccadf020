"""Counting device bytes, with a peak and an optional cap."""

from __future__ import annotations

import threading

from streamflow.stages.errors import DeviceMemoryError


class MemoryMeter:
    """Bytes in use and their peak. Thread-safe."""

    def __init__(self, device: str, limit_bytes: int | None = None) -> None:
        self._device = device
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self.in_use = 0
        self.peak = 0

    def take(self, nbytes: int) -> None:
        """Count ``nbytes``.

        :raises DeviceMemoryError: if they exceed the cap; nothing is counted then.
        """
        with self._lock:
            if self.limit_bytes is not None and self.in_use + nbytes > self.limit_bytes:
                raise DeviceMemoryError(self._device, nbytes, self.in_use, self.limit_bytes)
            self.in_use += nbytes
            self.peak = max(self.peak, self.in_use)

    def give_back(self, nbytes: int) -> None:
        """Uncount ``nbytes``."""
        with self._lock:
            self.in_use -= nbytes
