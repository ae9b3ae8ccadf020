"""What can be opened at all: refusals that need no more than a look at the object."""

from __future__ import annotations

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
    """Return if ``model`` is a module that nobody else moves.

    :raises UnsupportedModelError: if it is a pipeline (its transformer is named), no module, or managed by another
        offloading system.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(type(model).__name__, *_what_it_is(model))
    for path, module in model.named_modules():
        for attribute, (what, fix) in _FOREIGN_HOOKS.items():
            if module.__dict__.get(attribute) is not None:
                raise UnsupportedModelError(path or type(model).__name__, f"it carries {what}", fix)
    on_accelerator = next((n for n, p in model.named_parameters() if p.device.type not in ("cpu", "meta")), None)
    if on_accelerator is not None:
        raise UnsupportedModelError(
            on_accelerator, "it is on an accelerator already", "load the model on the host (device 'cpu')"
        )


def _what_it_is(model: object) -> tuple[str, str]:
    components = getattr(model, "components", None)
    if isinstance(components, dict):
        names = [name for name in _PIPELINE_MODELS if isinstance(components.get(name), nn.Module)]
        if names:
            return "it is a pipeline, not a module", f"open its {names[0]}: open_offload(pipeline.{names[0]})"
    return "it is no torch.nn.Module", "pass the model whose blocks are to be streamed"
