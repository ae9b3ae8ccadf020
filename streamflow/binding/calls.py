"""Coming between a caller and a module, outside of whatever `torch.compile` made of the module.

``module(...)`` looks at the instance for a compiled ``__call__`` before it runs its hooks and ``forward``. That is
where we stand: hooks of users and compiled code run inside, so no graph ever sees us, and none is compiled again when a
tensor is re-pointed. A direct ``module.forward(...)`` is met by a second guard, which a compiler does not trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

#: Runs a call: it gets the original callable and its arguments, and returns what that returns.
Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_COMPILED_CALL = "_compiled_call_impl"


class Interception:
    """Lets ``around`` run every call of ``module``; `remove` undoes it. It must allow for calls within calls."""

    def __init__(self, module: nn.Module, around: Around) -> None:
        self._module = module
        self._around = around
        self._found = {key: module.__dict__[key] for key in (_COMPILED_CALL, "forward") if key in module.__dict__}
        self._installed: dict[str, Callable[..., Any]] = {}

    def install(self) -> None:
        """Stand between from now on."""
        original_call = self._module._compiled_call_impl or self._module._call_impl
        original_forward = self._module.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._around(original_call, args, kwargs)

        @functools.wraps(original_forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original_forward(*args, **kwargs)
            return self._around(original_forward, args, kwargs)

        # past nn.Module.__setattr__: a compiled wrapper would hand the attribute on to what it wraps
        self._installed = {_COMPILED_CALL: call, "forward": forward}
        for key, ours in self._installed.items():
            object.__setattr__(self._module, key, ours)

    def remove(self) -> None:
        """Leave the module as it was found, and what somebody put around us meanwhile in place. Idempotent.

        Whoever kept our callables then calls the module's own.
        """
        self._around = _straight
        for key, ours in self._installed.items():
            if self._module.__dict__.get(key) is not ours:
                continue
            if key in self._found:
                object.__setattr__(self._module, key, self._found[key])
            else:
                self._module.__dict__.pop(key, None)


class MethodInterception:
    """Lets ``around`` run every call of the method ``name`` of ``module``; `remove` undoes it."""

    def __init__(self, module: nn.Module, name: str, around: Around) -> None:
        self._module = module
        self._name = name
        self._around = around
        self._had: dict[str, Any] = {}
        self._ours: Callable[..., Any] | None = None

    def install(self) -> None:
        """Stand between from now on."""
        original = getattr(self._module, self._name)
        self._had = {key: value for key, value in self._module.__dict__.items() if key == self._name}

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return self._around(original, args, kwargs)

        self._ours = method
        object.__setattr__(self._module, self._name, method)

    def remove(self) -> None:
        """Leave the module as it was found, and what somebody put around us meanwhile in place. Idempotent."""
        self._around = _straight
        if self._ours is not None and self._module.__dict__.get(self._name) is self._ours:
            del self._module.__dict__[self._name]
            self._module.__dict__.update(self._had)


def _straight(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call(*args, **kwargs)
