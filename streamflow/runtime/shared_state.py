"""What two requests must not use at the same time although the streamed model may be: parts of pipelines with state.

A diffusers pipeline keeps the state of its denoising loop in its scheduler, and a guider keeps the step and the pass
that it is at. Two requests that call one pipeline would advance both, and get wrong pictures without an error. A fast
tokenizer keeps how it pads and truncates, and a pipeline changes that from call to call: two threads in one tokenizer
get other tokens than they asked for, resident or streamed.

Give each request a pipeline of its own over the same models, with copies of all else, and they run side by side. Not so
with a guider that hooks into the model while it predicts: others would run into its hooks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

#: Methods that only they have: schedulers, fast tokenizers, guiders.
_MARKS = ("set_timesteps", "set_truncation_and_padding", "prepare_models")


def shared_state_of(call: partial[Any]) -> frozenset[int]:
    """The ``id`` of every scheduler, tokenizer and guider that ``call`` is seen to use: as what is called, in its
    arguments, in the variables that a function closes over or finds in its module, and in pipelines among all these.
    With a guider that hooks into models go the models of its pipeline.
    """
    return frozenset(id(part) for value in _reachable(call) for part in _state_of(list(_parts(value))))


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


def _parts(value: object) -> Iterator[object]:
    yield value
    yield getattr(value, "scheduler", None)
    components = getattr(value, "components", None)
    for part in components.values() if isinstance(components, Mapping) else ():
        yield part
        yield getattr(part, "tokenizer", None)  # a processor has one


def _state_of(parts: list[object]) -> Iterator[object]:
    yield from filter(_keeps_state, parts)
    if any(map(_hooks_models, parts)):
        yield from (part for part in parts if isinstance(part, nn.Module))


def _hooks_models(part: object) -> bool:
    """Whether it is a guider whose class takes back what it did to a model: the base of all of them does nothing."""
    return _keeps_state(part) and sum("cleanup_models" in vars(cls) for cls in type(part).__mro__) > 1


def _keeps_state(part: object) -> bool:
    return not isinstance(part, type) and any(callable(getattr(part, mark, None)) for mark in _MARKS)
