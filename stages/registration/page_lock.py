"""Page-locking memory of our own: one range, not a file's."""

from __future__ import annotations

import torch

from streamflow.stages.devices.base import Registrar


class PageLock:
    """Exactly ``memory`` (flat uint8 CPU tensor on whole pages of its own) is page-locked until `release`.

    :raises HostRegistrationError: if the device refuses; nothing is locked then.
    """

    def __init__(self, registrar: Registrar, memory: torch.Tensor) -> None:
        self._registrar = registrar
        self._memory: torch.Tensor | None = memory
        registrar.register(memory.data_ptr(), memory.numel(), read_only=False)

    def release(self) -> None:
        """Give the pages back. Idempotent.

        :raises HostRegistrationError: if the device refuses; the memory then stays locked, and this can be tried again.
        """
        if self._memory is not None:
            self._registrar.unregister(self._memory.data_ptr())
            self._memory = None
