"""``streamflow plan``: what of a model would stream, before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
import click
import torch

from streamflow.config import ALL, OffloadConfig
from streamflow.errors import ConfigurationError, PlanError
from streamflow.host_limits import available_host_bytes
from streamflow.tools.plan.declared import DeclaredPipeline, declared_by
from streamflow.tools.plan.estimate import plan_component
from streamflow.tools.plan.model_dir import Component, ModelDir, read_model_dir
from streamflow.tools.plan.names import list_paths
from streamflow.tools.plan.notes import notes_of
from streamflow.tools.plan.report import print_plan
from streamflow.tools.plan.values import ModelPlan
from streamflow.tools.terminal import print_json, result_console

DEFAULTS = {field.name: field.default for field in attrs.fields(OffloadConfig)}


def _resident_count(ctx: click.Context, param: click.Parameter, value: str | None) -> int | str | None:
    if value is None or value == ALL:
        return value
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a number of blocks nor {ALL!r}") from None


@click.command()
@click.argument("model_dir", type=click.Path(path_type=Path))
@click.option(
    "--window",
    "window_blocks",
    type=int,
    default=DEFAULTS["window_blocks"],
    show_default=True,
    help="Blocks that the device holds at a time.",
)
@click.option("--resident-blocks", callback=_resident_count, metavar="N|all", help="Blocks that stay on the device.")
@click.option("--resident-bytes", type=int, help="Device bytes that resident blocks may take.")
@click.option(
    "--resident-placement", default=DEFAULTS["resident_placement"], show_default=True, help="spread or leading."
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="What to plan for; it need not be here.  [default: cuda where there is one]",
)
@click.option("--transfer", default=DEFAULTS["transfer"], show_default=True, help="auto, direct or staged.")
@click.option(
    "--pin-host-memory/--no-pin-host-memory",
    default=DEFAULTS["pin_host_memory"],
    show_default=True,
    help="Page-lock what blocks are streamed from.",
)
@click.option(
    "--host-registration-limit-bytes",
    type=int,
    help="Most bytes of mapped files to page-lock, 0: none.  [default: all]",
)
@click.option("--packing-threads", type=int, help="Of the staged transfer.  [default: by the cores of this machine]")
@click.option(
    "--staging-chunk-bytes",
    type=int,
    default=DEFAULTS["staging_chunk_bytes"],
    show_default=True,
    help="What one packing thread copies at a time.",
)
@click.option(
    "--tensor-parallel-size",
    type=int,
    default=1,
    show_default=True,
    help="Ranks that hold parts of each tensor.",
)
@click.option("--hsdp", is_flag=True, help="Parameters are sharded after loading.")
@click.option("--online-quantization", metavar="METHOD", help="What converts the weights while they load.")
@click.option(
    "--stack",
    "stacks",
    multiple=True,
    metavar="PATH",
    help="A block list; repeat it in the order of execution.  [default: found by names]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def plan(model_dir: Path, device: str | None, stacks: tuple[str, ...], as_json: bool, **options: object) -> None:
    """Say what of a model would stream, before it is loaded.

    MODEL_DIR is the folder of a model with its safetensors files, one such file, or the folder of a diffusers
    pipeline. Only the headers of the files are read; sizes are those stored there.
    """
    # whether the device is here is no matter: the kind alone decides what streams, and how
    topology = {name: options.pop(name) for name in ("tensor_parallel_size", "hsdp", "online_quantization")}
    config = OffloadConfig.from_mapping({**options, "topology": topology, "device": "cpu"})
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    made = make_plan(read_model_dir(model_dir), config, device, stacks)
    if as_json:
        print_json({**attrs.asdict(made), "inferred_from": "tensor names"})
    else:
        print_plan(made, result_console())


def make_plan(model: ModelDir, config: OffloadConfig, device: str, stacks: tuple[str, ...]) -> ModelPlan:
    """The plan of ``model`` on a ``device`` of that kind; ``stacks`` are declared paths, for a model of one component.

    :raises ConfigurationError: if an option does not fit the model.
    :raises PlanError: if nothing of the model could stream.
    """
    if stacks and model.is_pipeline:
        names = ", ".join(component.name for component in model.components)
        raise ConfigurationError([f"--stack is for one component; give the folder of one of {names} instead"])
    declared = declared_by(model.class_name) if model.is_pipeline else None
    components = tuple(
        plan_component(component, config, device_is_host=device == "cpu", stacks=stacks, declared=declared)
        for component in _in_order(model, declared)
    )
    if not any(component.stacks for component in components):
        raise PlanError(
            f"{model.path}: its tensors' names show no list of blocks with enough of the weights; "
            "name its block lists with --stack",
            [path for component in model.components for path in list_paths(component)],
        )
    available = available_host_bytes()
    return ModelPlan(
        path=str(model.path),
        is_pipeline=model.is_pipeline,
        device=device,
        options={**config.effective(), "device": device, "stacks": list(stacks)},
        host_available_bytes=available,
        components=components,
        left_out=model.left_out,
        notes=notes_of(components, model.left_out, stacks_declared=bool(stacks), host_available_bytes=available),
    )


def _in_order(model: ModelDir, declared: DeclaredPipeline | None) -> Sequence[Component]:
    """The components as they run, as far as their pipeline declares it."""
    if declared is None:
        return model.components
    return sorted(model.components, key=lambda component: declared.rank(component.name))
