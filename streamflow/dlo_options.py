"""The options of vLLM-Omni's distributed layerwise offload (DLO), in ours. Pure: no torch, no clock.

What an option left out means, and which options go together, is as it is there. What cannot be done here is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from streamflow.errors import ConfigurationError

GIB = 1 << 30
MODES = ("disabled", "preferred", "required")

#: Every option that is accepted, with its default there.
DEFAULTS: Mapping[str, Any] = {
    "dlo_use_allgather": True,
    "dlo_resident_layers": 0,
    "dlo_offload_components": None,
    "dlo_enable_runtime_cache": False,
    "dlo_runtime_cache_dir": None,
    "dlo_runtime_cache_lock_timeout": 600,
    "dlo_runtime_cache_pin_limit_gib": 0,
    "host_weight_runtime_mode": "disabled",
    "host_weight_runtime_root": None,
    "dlo_host_registration_limit_gib": 0,
    "pin_cpu_memory": True,
}
_SWITCHES = ("dlo_use_allgather", "dlo_enable_runtime_cache", "pin_cpu_memory")
_LIMITS = ("dlo_runtime_cache_pin_limit_gib", "dlo_host_registration_limit_gib")
_PATHS = ("dlo_runtime_cache_dir", "host_weight_runtime_root")


def translated(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `OffloadConfig` that do what ``options``, whose names are all known, ask for.

    :raises ConfigurationError: if values or combinations are refused there, or cannot be done here; it lists them all.
    """
    values = {**DEFAULTS, **options}
    problems = list(_wrong_values(values))
    problems = problems or [*_wrong_together(values), *_said_twice(values)]
    if problems:
        raise ConfigurationError(problems)
    return {
        "components": values["dlo_offload_components"],
        "pin_host_memory": values["pin_cpu_memory"],
        "ranks": {"gather": _gather(options)},
        **_residents(values["dlo_resident_layers"]),
        **_store(values),
    }


def _gather(options: Mapping[str, Any]) -> str:
    """Left out, ranks gather where they can: a process that is alone need not say that it is."""
    if "dlo_use_allgather" not in options:
        return "auto"
    return "always" if options["dlo_use_allgather"] else "never"


def _residents(num_layers: int) -> dict[str, Any]:
    return {"resident_blocks": num_layers, "resident_placement": "leading"} if num_layers else {}


def _store(values: Mapping[str, Any]) -> dict[str, Any]:
    """Both of its caches are our store: the earlier one goes on without whenever it fails, as ``preferred`` does."""
    has_cache = values["dlo_enable_runtime_cache"]
    root = values["dlo_runtime_cache_dir"] if has_cache else values["host_weight_runtime_root"]
    options: dict[str, Any] = {"publication_wait_s": values["dlo_runtime_cache_lock_timeout"]}
    if root is not None:
        options["root"] = root
    return {
        "store_mode": "preferred" if has_cache else values["host_weight_runtime_mode"],
        "store": options,
        "host_registration_limit_bytes": _registration_limit(values),
    }


def _registration_limit(values: Mapping[str, Any]) -> int | None:
    if values["dlo_enable_runtime_cache"]:  # 0: nothing is registered
        return int(values["dlo_runtime_cache_pin_limit_gib"] * GIB)
    limit = values["dlo_host_registration_limit_gib"]  # 0: no ceiling
    return int(limit * GIB) if limit else None


def _wrong_values(values: Mapping[str, Any]) -> Iterator[str]:
    for name in _SWITCHES:
        if not isinstance(values[name], bool):
            yield f"{name} must be True or False, not {values[name]!r}"
    layers = values["dlo_resident_layers"]
    if type(layers) is not int or layers < 0:
        yield f"dlo_resident_layers must be an integer of at least 0, not {layers!r}"
    for name in _LIMITS:
        if not _is_number(values[name]) or values[name] < 0:
            yield f"{name} must be a finite number of GiB of at least 0, not {values[name]!r}"
    timeout = values["dlo_runtime_cache_lock_timeout"]
    if not _is_number(timeout) or timeout <= 0:
        yield f"dlo_runtime_cache_lock_timeout must be a positive, finite number of seconds, not {timeout!r}"
    for name in _PATHS:
        path = values[name]
        if path is not None and (not isinstance(path, str) or not path.strip()):
            yield f"{name} must be a path or None, not {path!r}"
    if values["host_weight_runtime_mode"] not in MODES:
        mode = values["host_weight_runtime_mode"]
        yield f"host_weight_runtime_mode must be one of {', '.join(map(repr, MODES))}, not {mode!r}"


def _wrong_together(values: Mapping[str, Any]) -> Iterator[str]:
    """What is refused there, too."""
    has_runtime = values["host_weight_runtime_mode"] != "disabled"
    needs_no_gather = {
        "dlo_resident_layers": values["dlo_resident_layers"],
        "dlo_enable_runtime_cache": values["dlo_enable_runtime_cache"],
        "host_weight_runtime_mode": has_runtime,
        "dlo_host_registration_limit_gib": values["dlo_host_registration_limit_gib"],
    }
    if values["dlo_use_allgather"]:
        for name in (name for name, is_set in needs_no_gather.items() if is_set):
            yield f"{name}={values[name]!r} needs dlo_use_allgather=False (True where it is left out)"
    if has_runtime and values["host_weight_runtime_root"] is None:
        yield f"host_weight_runtime_mode={values['host_weight_runtime_mode']!r} needs host_weight_runtime_root"
    if values["dlo_host_registration_limit_gib"] and not has_runtime:
        yield "dlo_host_registration_limit_gib needs host_weight_runtime_mode 'preferred' or 'required'"
    if values["dlo_runtime_cache_pin_limit_gib"] and not values["dlo_enable_runtime_cache"]:
        yield "dlo_runtime_cache_pin_limit_gib needs dlo_enable_runtime_cache=True: it is about that cache's mapping"


def _said_twice(values: Mapping[str, Any]) -> Iterator[str]:
    """The two caches there are one store here."""
    if values["dlo_enable_runtime_cache"] and values["host_weight_runtime_mode"] != "disabled":
        yield "dlo_enable_runtime_cache and host_weight_runtime_mode ask for two caches; here they are one: keep either"


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
