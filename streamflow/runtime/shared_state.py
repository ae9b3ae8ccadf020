"""What two requests must not use at the same time although the streamed model may be: pipelines with a scheduler.

A diffusers pipeline keeps the state of its denoising loop in its scheduler. Two requests that call one pipeline would
advance the same scheduler, and both would get wrong pictures without an error. Give each request a pipeline of its own
over the same components (`Pipeline.from_pipe`, with copies of scheduler and tokenizers), and they run side by side.

A fast tokenizer keeps how it pads and truncates, and a pipeline changes that from call to call: two threads in one
tokenizer get other tokens than they asked for, resident or streamed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any


def shared_state_of(call: partial[Any]) -> frozenset[int]:
    """The ``id`` of every scheduler and tokenizer that ``call`` is seen to use: as what is called, in its arguments, in
    the variables that a function closes over or finds in its module, and in pipelines among all these.
    """
    return frozenset(id(found) for value in _reachable(call) for found in (*_schedulers(value), *_tokenizers(value)))


def _reachable(value: object) -> Iterator[object]:
    match value:
        case partial():
            yield from _reachable(value.func)
            yield from value.args
            yield from value.keywords.values()
        case MethodType():
            yield value.__self__
        case FunctionType():
            with suppress(ValueError):  # a variable that has no value yet
                variables = inspect.getclosurevars(value)
                yield from (*variables.nonlocals.values(), *variables.globals.values())
        case _:
            yield value


def _schedulers(value: object) -> Iterator[object]:
    for candidate in (value, getattr(value, "scheduler", None)):
        if callable(getattr(candidate, "set_timesteps", None)) and not isinstance(candidate, type):
            yield candidate


def _tokenizers(value: object) -> Iterator[object]:
    components = getattr(value, "components", None)
    for part in components.values() if isinstance(components, Mapping) else ():
        for candidate in (part, getattr(part, "tokenizer", None)):  # a processor has one
            if callable(getattr(candidate, "set_truncation_and_padding", None)):
                yield candidate
