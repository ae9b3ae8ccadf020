"""A plan for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from streamflow.config import OffloadConfig
from streamflow.tools.plan.notes import grouped
from streamflow.tools.plan.values import ComponentPlan, ModelPlan, SourcePlan
from streamflow.tools.terminal import format_bytes, format_share, plain_table


def print_plan(plan: ModelPlan, console: Console) -> None:
    """The tables of ``plan`` and its notes."""
    what = "pipeline" if plan.is_pipeline else "model"
    console.print(Text(f"Plan for the {what} {plan.path}", style="bold"))
    console.print(Text(", ".join(f"{name} {value}" for name, value in _shown_options(plan)), style="dim"))
    console.print()
    streaming = [component for component in plan.components if component.stacks]
    if streaming:
        _print_stacks(streaming, console)
        _print_device(streaming, plan.device, console)
        _print_sources(streaming, console)
    for note in plan.notes:
        console.print(Padding(Text(f"- {note}"), (0, 0, 0, 1)))


def _shown_options(plan: ModelPlan) -> Iterator[tuple[str, object]]:
    """The options that matter always, and those that are not at their defaults."""
    defaults = OffloadConfig(device="cpu").effective()
    for name, value in plan.options.items():
        if name in ("device", "window_blocks") or value not in (defaults.get(name), []):
            yield name, value


def _print_stacks(components: list[ComponentPlan], console: Console) -> None:
    table = plain_table(
        "component", "stack", "blocks", "resident", "smallest", "largest", "together", num_left=2, title="Blocks"
    )
    for component in components:
        for index, stack in enumerate(component.stacks):
            table.add_row(
                _label(component) if index == 0 else "",
                stack.path or "(the model itself)",
                str(stack.num_blocks),
                str(stack.num_resident_blocks),
                format_bytes(stack.min_block_bytes),
                format_bytes(stack.max_block_bytes),
                format_bytes(stack.total_bytes),
            )
    console.print(table)


def _print_device(components: list[ComponentPlan], device: str, console: Console) -> None:
    table = plain_table(
        "component",
        "window",
        "residents",
        "outside blocks",
        "together",
        "of weights",
        "share",
        title=f"Memory of {device}",
    )
    for component in components:
        fixed = 0 if component.chosen is None else component.chosen.fixed_bytes
        table.add_row(
            component.name,
            f"{component.num_slots} x {format_bytes(component.slot_bytes)} = {format_bytes(component.window_bytes)}",
            format_bytes(component.resident_bytes),
            format_bytes(fixed),
            format_bytes(component.device_bytes),
            format_bytes(component.weight_bytes),
            format_share(component.device_bytes, component.weight_bytes),
        )
    console.print(table)


def _print_sources(components: list[ComponentPlan], console: Console) -> None:
    table = plain_table(
        *("component", "source", "", "transfer", "weights", "locked", "registered", "staging"),
        num_left=4,
        title="Host memory by source",
    )
    for component in components:
        for index, source in enumerate(component.sources):
            table.add_row(component.name if index == 0 else "", *_source_cells(source, component.source == source.name))
    console.print(table)
    for choice, names in grouped((_choice(component), component.name) for component in components).items():
        console.print(Padding(Text.assemble((f"{', '.join(names)}: ", "bold"), choice), (0, 0, 0, 1)))
    console.print()


def _source_cells(source: SourcePlan, is_chosen: bool) -> Iterator[str | Text]:
    yield source.name
    yield Text("chosen", style="bold green") if is_chosen else Text("not possible" if source.problem else "", "dim")
    yield source.transfer or "none"
    yield format_bytes(source.weight_host_bytes)
    yield format_bytes(source.page_locked_bytes)
    yield format_bytes(source.registered_bytes)
    yield format_bytes(source.staging_bytes)


def _choice(component: ComponentPlan) -> str:
    chosen = component.chosen
    if chosen is None:
        return f"nothing can stream: {component.source_reason}"
    return f"{chosen.name}, because {component.source_reason}; {chosen.transfer}, because {chosen.transfer_reason}."


def _label(component: ComponentPlan) -> str:
    return component.name if component.kind is None else f"{component.name} ({component.kind})"
