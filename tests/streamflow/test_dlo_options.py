"""Options of vLLM-Omni's distributed layerwise offload: each does here what it does there, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamflow import OffloadConfig
from streamflow.dlo_options import DEFAULTS
from streamflow.errors import ComponentPolicyTypeError, ConfigurationError

RANK_LOCAL = {"dlo_use_allgather": False}
RUNTIME = {**RANK_LOCAL, "host_weight_runtime_mode": "required", "host_weight_runtime_root": "/srv/weights"}
CACHE = {**RANK_LOCAL, "dlo_enable_runtime_cache": True, "dlo_runtime_cache_dir": "/srv/cache"}
GIB = 1 << 30


def read(config: OffloadConfig, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"store_mode": "disabled", "resident_blocks": None, "pin_host_memory": True, "components": None}),
        ({}, {"host_registration_limit_bytes": None, "store.publication_wait_s": 600, "ranks.gather": "auto"}),
        ({"dlo_use_allgather": True}, {"ranks.gather": "always", "resident_blocks": None, "store_mode": "disabled"}),
        (RANK_LOCAL, {"ranks.gather": "never"}),
        ({**RANK_LOCAL, "dlo_resident_layers": 3}, {"resident_blocks": 3, "resident_placement": "leading"}),
        ({"dlo_offload_components": {"vae": False, "default": True}}, {"components": {"vae": False, "default": True}}),
        ({"pin_cpu_memory": False}, {"pin_host_memory": False}),
        (CACHE, {"store_mode": "preferred", "store.root": "/srv/cache", "host_registration_limit_bytes": 0}),
        ({**CACHE, "dlo_runtime_cache_lock_timeout": 5}, {"store.publication_wait_s": 5}),
        ({**CACHE, "dlo_runtime_cache_pin_limit_gib": 1.5}, {"host_registration_limit_bytes": 3 * GIB // 2}),
        (RUNTIME, {"store_mode": "required", "store.root": "/srv/weights", "host_registration_limit_bytes": None}),
        ({**RUNTIME, "dlo_host_registration_limit_gib": 80}, {"host_registration_limit_bytes": 80 * GIB}),
        ({**RUNTIME, "dlo_host_registration_limit_gib": 0}, {"host_registration_limit_bytes": None}),
    ],
    ids=str,
)
def test_an_option_does_what_it_does_there(options: dict[str, Any], expected: dict[str, Any]) -> None:
    config = OffloadConfig.from_dlo_options(options)
    assert {path: read(config, path) for path in expected} == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dlo_resident_layers": 2}, r"dlo_resident_layers=2 needs dlo_use_allgather=False"),
        ({"dlo_enable_runtime_cache": True}, "dlo_enable_runtime_cache=True needs dlo_use_allgather=False"),
        ({**RUNTIME, "dlo_use_allgather": True}, "host_weight_runtime_mode='required' needs dlo_use_allgather=False"),
        ({**RANK_LOCAL, "host_weight_runtime_mode": "preferred"}, "needs host_weight_runtime_root"),
        ({**RANK_LOCAL, "dlo_host_registration_limit_gib": 8}, "needs host_weight_runtime_mode"),
        ({**RANK_LOCAL, "dlo_runtime_cache_pin_limit_gib": 8}, "needs dlo_enable_runtime_cache=True"),
        ({**CACHE, **RUNTIME}, "two caches"),
        ({"dlo_resident_layers": -1}, "at least 0"),
        ({"dlo_resident_layers": True}, "must be an integer"),
        ({"dlo_use_allgather": 1}, "must be True or False"),
        ({**CACHE, "dlo_runtime_cache_lock_timeout": 0}, "positive, finite number of seconds"),
        ({**CACHE, "dlo_runtime_cache_pin_limit_gib": float("inf")}, "finite number of GiB"),
        ({"host_weight_runtime_mode": "sometimes"}, "'disabled', 'preferred', 'required'"),
        ({**RUNTIME, "host_weight_runtime_root": " "}, "must be a path"),
        ({"dlo_resident_layer": 1}, "did you mean 'dlo_resident_layers'"),
        ({"window_blocks": 2}, "there is no option 'window_blocks'"),
    ],
    ids=str,
)
def test_what_is_refused_there_or_impossible_here_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        OffloadConfig.from_dlo_options(options)


def test_components_are_a_mapping_of_names_to_booleans() -> None:
    for wrong in (["vae"], {"vae": 0}, {1: True}):
        with pytest.raises(ComponentPolicyTypeError):
            OffloadConfig.from_dlo_options({"dlo_offload_components": wrong})


def test_all_problems_are_said_at_once() -> None:
    with pytest.raises(ConfigurationError) as raised:
        OffloadConfig.from_dlo_options({"dlo_resident_layers": -1, "pin_cpu_memory": "yes"})
    assert len(raised.value.problems) == 2


@given(left_out=st.sets(st.sampled_from(sorted(DEFAULTS))))
def test_a_default_that_is_said_means_what_it_means_left_out(left_out: set[str]) -> None:
    said = {name: value for name, value in DEFAULTS.items() if name not in left_out | {"dlo_use_allgather"}}
    assert OffloadConfig.from_dlo_options(said) == OffloadConfig.from_dlo_options({})
