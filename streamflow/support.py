"""What can be opened at all: refusals that need no more than a look at the object."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from streamflow.errors import UnsupportedModelError

#: Attributes that other offloading systems leave on modules they manage, and what they are.
_FOREIGN_HOOKS = {
    "_hf_hook": ("accelerate's hooks", "call accelerate.hooks.remove_hook_from_module(model, recurse=True) first"),
    "_diffusers_hook": (
        "diffusers' hooks",
        "load the model without group offload, casting or caching",
    ),
}
_PIPELINE_MODELS = ("transformer", "transformer_2", "unet", "prior")


def check_model(model: object) -> None:
    """Return if ``model`` is a module with its weights on the host that nobody else moves.

    :raises UnsupportedModelError: if it is a pipeline (its transformer is named), no module, managed by another
        offloading system, on an accelerator, or without its weights.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(type(model).__name__, *_what_it_is(model))
    for path, module in model.named_modules():
        for attribute, (what, fix) in _FOREIGN_HOOKS.items():
            hooks = module.__dict__.get(attribute)
            if _carries(hooks):
                which = ", ".join(getattr(hooks, "hooks", None) or (type(hooks).__name__,))
                raise UnsupportedModelError(path or type(model).__name__, f"it carries {what} ({which})", fix)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise UnsupportedModelError(name, "it is not initialised yet", "run the model once before opening")
        if tensor.is_meta:
            raise UnsupportedModelError(
                name, "it is on the meta device, without values", "load the model first, or use open_streamed"
            )
        if tensor.device.type != "cpu":
            raise UnsupportedModelError(
                name, "it is on an accelerator already", "load the model on the host (device 'cpu')"
            )


def _carries(hooks: object) -> bool:
    """Whether there are hooks: diffusers leaves an empty registry on every model that a pipeline has called."""
    return hooks is not None and getattr(hooks, "hooks", True) != {}


def check_not_compiled_whole(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Return if no module around the blocks is compiled: code that was fused across blocks cannot stop between them.

    :raises UnsupportedModelError: if one is. Blocks, and what lies inside or beside them, may be compiled.
    """
    inside = {id(module) for block in blocks for module in block.modules()}
    around = [entry for entry in model.named_modules() if any(id(m) in inside for m in entry[1].modules())]
    for path, module in around:
        if id(module) not in inside and _is_compiled(module):
            raise UnsupportedModelError(
                path or type(model).__name__,
                "it is compiled as a whole, so that its blocks are one piece of code",
                "compile its blocks instead (block.compile() for each)",
            )


def outside_of_compiled(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of ``model`` that can be called from outside: all but those inside of compiled ones."""
    compiled = [module for module in model.modules() if _has_compiled(module)]
    inside = {id(inner) for module in compiled for inner in module.modules() if inner is not module}
    return (module for module in model.modules() if id(module) not in inside)


def _is_compiled(module: nn.Module) -> bool:
    by_module_compile = module._compiled_call_impl is not None
    by_torch_compile = "_orig_mod" in module._modules
    return by_module_compile or by_torch_compile or _is_compiled_function(module.__dict__.get("forward"))


def _has_compiled(module: nn.Module) -> bool:
    """Whether it is compiled, or one of its methods is."""
    return _is_compiled(module) or any(map(_is_compiled_function, list(module.__dict__.values())))


def _is_compiled_function(value: object) -> bool:
    return callable(value) and hasattr(value, "_torchdynamo_orig_callable")


def _what_it_is(model: object) -> tuple[str, str]:
    components = getattr(model, "components", None)
    if isinstance(components, dict):
        names = [name for name in _PIPELINE_MODELS if isinstance(components.get(name), nn.Module)]
        if names:
            return "it is a pipeline, not a module", f"open its {names[0]}: open_offload(pipeline.{names[0]})"
    return "it is no torch.nn.Module", "pass the model whose blocks are to be streamed"
