"""What a caller's thread and task had in force, taken along into a worker thread."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

import attrs
import torch

Result = TypeVar("Result")


@attrs.frozen
class _Autocast:
    device_type: str
    enabled: bool
    dtype: torch.dtype

    def entered(self, cache_enabled: bool) -> torch.autocast:
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=cache_enabled)


@attrs.frozen
class CallerContext:
    """Context variables, grad and inference mode, autocast, default device and current CUDA device of one moment."""

    variables: contextvars.Context
    grad_enabled: bool
    inference_mode: bool
    autocasts: tuple[_Autocast, ...]
    autocast_cache: bool
    default_device: torch.device
    cuda_device: int | None

    @classmethod
    def capture(cls) -> CallerContext:
        """The context of the calling thread and task, as it is now."""
        types = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        cuda_in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            variables=_context_without_loop(),
            grad_enabled=torch.is_grad_enabled(),
            inference_mode=torch.is_inference_mode_enabled(),
            autocasts=tuple(
                _Autocast(name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in types
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            default_device=torch.get_default_device(),
            cuda_device=torch.cuda.current_device() if cuda_in_use else None,
        )

    def run(self, work: Callable[[], Result]) -> Result:
        """Call ``work`` in the calling thread with all of it in force, and leave the thread as it was."""
        return self.variables.run(self._run_in_modes, work)

    def _run_in_modes(self, work: Callable[[], Result]) -> Result:
        # Each mode is entered, also where it is off: leaving it undoes what the work sets and does not reset.
        default_device = torch.get_default_device()
        try:
            with ExitStack() as modes:
                if self.cuda_device is not None:
                    modes.enter_context(torch.cuda.device(self.cuda_device))
                if self.default_device != default_device:  # not else: it makes every call in torch slower
                    modes.enter_context(self.default_device)
                modes.enter_context(torch.inference_mode(self.inference_mode))
                modes.enter_context(torch.set_grad_enabled(self.grad_enabled))
                for cast in self.autocasts:
                    modes.enter_context(cast.entered(self.autocast_cache))
                return work()
        finally:
            if torch.get_default_device() != default_device:
                torch.set_default_device(None if default_device.type == "cpu" else default_device)


def _context_without_loop() -> contextvars.Context:
    """A copy of the current context in which no event loop is said to run: none does in the thread that gets it."""
    context = contextvars.copy_context()
    for variable in context:
        if variable.name == "current_async_library_cvar":  # what anyio asks before it starts a loop
            context.run(variable.set, None)
            break
    return context
