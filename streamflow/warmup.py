"""Warm-up: a dummy request before the first real one, so that what the first request costs is paid at opening.

A pipeline's class may declare its largest request as ``streamflow_warmup``, a `WarmUpRecipe` that speaks of no feature
of one pipeline only. Without one, a pipeline that needs no more than a prompt is asked for one step.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs
import torch

from streamflow.errors import WarmUpError
from streamflow.runtime.offload import Offload

#: Attribute of a pipeline's class that holds its `WarmUpRecipe`.
RECIPE_ATTRIBUTE = "streamflow_warmup"
#: How the frames of a recipe's ``duration_s`` are counted where the pipeline does not say.
FRAMES_PER_S = 24
#: Attributes in which pipelines keep by how much their VAE shrinks pictures and videos.
_SPATIAL = ("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_compression_ratio")
_TEMPORAL = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")

_log = logging.getLogger(__name__)
_is_dummy: ContextVar[bool] = ContextVar("streamflow_is_dummy_run", default=False)


@attrs.frozen(kw_only=True)
class WarmUpRecipe:
    """A request, in words that hold for every pipeline; None: not asked for.

    Attributes:
        task: what the request is, for logs and errors.
        prompt: the text; it is all the input there is unless ``more`` has other.
        size: pixels of the longer edge.
        aspect_ratio: width over height; None: a square.
        duration_s: seconds of a video.
        steps: denoising steps.
        guidance: the guidance scale.
        more: further arguments. Those that the pipeline's call knows go there by name, the others to whatever it takes
            beyond them.
    """

    task: str | None = None
    prompt: str = ""
    size: int | None = None
    aspect_ratio: float | None = None
    duration_s: float | None = None
    steps: int = 1
    guidance: float | None = None
    more: Mapping[str, Any] = attrs.field(factory=dict, hash=False)


#: What may be given as ``warmup``; True: what the pipeline declares, else a generic step.
WarmUp = bool | Mapping[str, Any] | Callable[[], object] | WarmUpRecipe | None


def is_dummy_run() -> bool:
    """Whether the calling thread runs a warm-up: its results are nobody's, and it counts in no metric."""
    return _is_dummy.get()


async def warm_up(offload: Offload, model: Any, warmup: WarmUp, *, on_failure: str = "error") -> None:
    """Run the warm-up as a request of its own. Cancellable; it is left out of the statistics.

    ``warmup`` True: the recipe that the pipeline's class declares, else a generic step. ``on_failure`` ``"warn"`` logs
    what ``"error"`` raises.

    :raises WarmUpError: if it fails, or cannot be done.
    """
    if warmup is None or warmup is False:
        return
    try:
        work = _work(model, warmup)
        with _marked(), _quiet(model):
            await offload.run_uncounted(torch.no_grad()(work))
    except Exception as failure:
        error = failure if isinstance(failure, WarmUpError) else WarmUpError(type(model).__name__, str(failure))
        if on_failure == "error":
            raise error from failure
        _log.warning("%s", error)


def _work(model: Any, warmup: WarmUp) -> Callable[[], object]:
    if callable(warmup) and not isinstance(warmup, (bool, WarmUpRecipe)):
        return warmup
    arguments = call_arguments(model, _recipe(model, warmup))
    return lambda: model(**arguments)


def _recipe(model: Any, warmup: Any) -> WarmUpRecipe:
    """A copy: a call may change what it is given."""
    if warmup is True:
        warmup = getattr(model, RECIPE_ATTRIBUTE, None) or WarmUpRecipe()
    if isinstance(warmup, Mapping):
        known = {field.name for field in attrs.fields(WarmUpRecipe)}
        named = {key: value for key, value in warmup.items() if key in known}
        more = {key: value for key, value in warmup.items() if key not in known}
        warmup = WarmUpRecipe(**{**named, "more": {**named.get("more", {}), **more}})
    if not isinstance(warmup, WarmUpRecipe):
        problem = f"warmup must be True, a recipe, a mapping of one, a function or None, not {warmup!r}"
        raise WarmUpError(type(model).__name__, problem)
    return copy.deepcopy(warmup)


def call_arguments(pipeline: Any, recipe: WarmUpRecipe) -> dict[str, Any]:
    """What the pipeline is called with for ``recipe``.

    :raises WarmUpError: if the pipeline needs other input, or cannot be asked for what the recipe says.
    """
    name = type(pipeline).__name__
    parameters = inspect.signature(type(pipeline).__call__).parameters
    takes_more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = {**dict(_neutral(pipeline, recipe, parameters)), **recipe.more}
    unknown = [key for key in arguments if key not in parameters]
    if unknown and not takes_more:
        raise WarmUpError(name, f"its call takes no {', '.join(unknown)}")
    missing = [key for key, parameter in parameters.items() if _is_needed(key, parameter) and key not in arguments]
    if missing:
        raise WarmUpError(name, f"it needs {', '.join(missing)}, too; declare a recipe that has them")
    return arguments


def _is_needed(key: str, parameter: inspect.Parameter) -> bool:
    by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    return key != "self" and by_name and parameter.default is parameter.empty


def _neutral(pipeline: Any, recipe: WarmUpRecipe, parameters: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "prompt", recipe.prompt
    yield "num_inference_steps", recipe.steps
    if recipe.size is not None:
        yield from zip(("width", "height"), _edges(recipe, pipeline), strict=True)
    if recipe.duration_s is not None:
        yield "num_frames", _frames(recipe.duration_s, pipeline)
    if recipe.guidance is not None:
        yield "guidance_scale", recipe.guidance
    if "generator" in parameters:  # one of its own: the process's is the program's
        yield "generator", torch.Generator().manual_seed(0)


def _edges(recipe: WarmUpRecipe, pipeline: Any) -> tuple[int, int]:
    """Width and height, in multiples of what the VAE and the patches need."""
    ratio, step = recipe.aspect_ratio or 1.0, 2 * _factor(pipeline, _SPATIAL, 8)
    size = recipe.size or 0
    width, height = (size, size / ratio) if ratio >= 1 else (size * ratio, size)
    return _multiple(width, step), _multiple(height, step)


def _multiple(value: float, step: int) -> int:
    return max(step, int(value // step) * step)


def _factor(pipeline: Any, names: tuple[str, ...], default: int) -> int:
    return int(next((getattr(pipeline, name) for name in names if hasattr(pipeline, name)), default))


def _frames(duration_s: float, pipeline: Any) -> int:
    """Frames as temporal VAEs take them: a multiple of their factor, and one."""
    factor = _factor(pipeline, _TEMPORAL, 4)
    return factor * max(1, math.ceil(duration_s * FRAMES_PER_S / factor)) + 1


@contextmanager
def _marked() -> Iterator[None]:
    token = _is_dummy.set(True)
    try:
        yield
    finally:
        _is_dummy.reset(token)


@contextmanager
def _quiet(model: Any) -> Iterator[None]:
    """No progress bar for a run that nobody asked for."""
    configure = getattr(model, "set_progress_bar_config", None)
    if not callable(configure):
        yield
        return
    before = vars(model).get("_progress_bar_config")
    configure(disable=True)
    try:
        yield
    finally:
        if before is None:
            vars(model).pop("_progress_bar_config", None)
        else:
            configure(**before)
