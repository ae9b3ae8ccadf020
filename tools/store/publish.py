"""``streamflow store publish``: put a model's final weights into the store before anybody needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import attrs
import click
import torch

from streamflow.config import OffloadConfig
from streamflow.diffusers_models import diffusers_builder
from streamflow.hardware import Hardware
from streamflow.host_weights.load_inputs import LoadInputs
from streamflow.host_weights.streaming import publish_through_store
from streamflow.model_request import ModelRequest
from streamflow.plan import OffloadPlan
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.store.reports import StoreReport
from streamflow.tools.store.options import options_at, store_command
from streamflow.tools.terminal import byte_progress, fact_table, print_json, result_console

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@click.command("publish")
@click.argument("model_dir", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    help="What from_pretrained is asked for.  [default: the dtypes that the class gives itself]",
)
@click.option(
    "--stack",
    "stacks",
    multiple=True,
    metavar="PATH",
    help="A block list, as in the plan that the model is opened with.  [default: no plan, as there]",
)
@store_command
def publish(model_dir: Path, dtype: str | None, stacks: tuple[str, ...], root: Path | None, as_json: bool) -> None:
    """Publish the weights of a diffusers model, so that the next opening of it finds them. Needs no accelerator.

    MODEL_DIR is the folder that the model's save_pretrained wrote. The entry is what
    open_streamed(diffusers_builder(MODEL_DIR, dtype), MODEL_DIR) looks for with the same dtype and plan.
    """
    request = ModelRequest(
        build=diffusers_builder(model_dir, None if dtype is None else DTYPES[dtype]),
        checkpoint_dir=model_dir,
        config=OffloadConfig(
            device="cpu",
            store_mode="preferred",
            store=options_at(root),
            plan=OffloadPlan(stacks=stacks) if stacks else None,
        ),
        load=None,
        finalize=None,
        adapters=(),
        inputs=LoadInputs(),
        hardware=Hardware(CpuDevice()),
    )
    with byte_progress(f"publishing {model_dir}") as progress:
        report = anyio.run(lambda: publish_through_store(request, progress))
    if as_json:
        print_json(_as_values(report))
    else:
        _print(report)


def _as_values(report: StoreReport) -> dict[str, Any]:
    return attrs.asdict(report)


def _print(report: StoreReport) -> None:
    table = fact_table()
    for name, value in _as_values(report).items():
        if value is not None and name != "remapped":
            table.add_row(name.replace("_", " "), str(value))
    result_console().print(table)
