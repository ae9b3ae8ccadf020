"""What has to be equal on all ranks of a gather group, and in what they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from streamflow._version import __version__
from streamflow.canonical_json import canonical_json
from streamflow.config import OffloadConfig
from streamflow.host_weights.plain_values import plain

#: Options that decide which blocks stream, in which order and waves, and from where.
EQUAL = (
    "window_blocks",
    "resident_blocks",
    "resident_bytes",
    "resident_placement",
    "transfer",
    "pin_host_memory",
    "plan",
    "components",
    "device_budget_bytes",
    "topology",
    "store_mode",
    "remap_after_publish",
    "ranks",
    "max_running_requests",
    "max_passes_per_walk",
    "stateful_modules",
)
#: Options that each rank may have for itself: its own device, memory limits, threads, files and clients.
OWN = (
    "host_registration_limit_bytes",
    "registration_piece_bytes",
    "probe_deadline_s",
    "packing_threads",
    "staging_chunk_bytes",
    "run_ahead_blocks",
    "device",
    "store",
    "max_waiting_requests",
    "admission_window_s",
    "close_mode",
    "close_deadline_s",
    "trace_path",
    "trace_events",
    "warmup_failure",
    "poison_freed_slots",
)


def fingerprint(config: OffloadConfig) -> dict[str, Any]:
    """What must be equal on all ranks, as plain values for JSON: versions, the device's kind, options.

    Two ranks may differ in their device's index, in their tensor-parallel rank and in what `OWN` names.
    """
    effective = config.effective()
    options = {name: plain(effective[name], name) for name in EQUAL}
    del options["topology"]["tensor_parallel_rank"]
    return {
        "streamflow": __version__,
        "torch": str(torch.__version__),
        "device_type": config.torch_device().type,
        **options,
    }


def differing(values_by_rank: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields that are not equal on all ranks, sorted; those of groups of options as ``group.field``.

    A field that a rank does not have differs. Values are plain, as `fingerprint` gives them.
    """
    flat = [dict(_flat(values, "")) for values in values_by_rank]
    names = {name for values in flat for name in values}
    return sorted(name for name in names if len({_text(values, name) for values in flat}) > 1)


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _text(values: Mapping[str, Any], name: str) -> bytes | None:
    return canonical_json(values[name], infinities=True) if name in values else None
