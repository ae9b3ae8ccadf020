"""streamflow streams the weights of models that do not fit on the accelerator; outputs are byte-identical.

Names are imported when they are used first: ``streamflow --help`` need not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from streamflow._version import __version__

if TYPE_CHECKING:
    from streamflow.config import OffloadConfig
    from streamflow.facade import StartedOffload, offload, start_offload
    from streamflow.host_weights.load_inputs import LoadInputs
    from streamflow.loaded import open_offload
    from streamflow.plan import OffloadPlan
    from streamflow.ranks.options import RankOptions
    from streamflow.ranks.topology import RankGroups
    from streamflow.runtime.offload import Offload
    from streamflow.runtime.statistics import OffloadStatistics
    from streamflow.stages.errors import StreamflowError
    from streamflow.stages.ranks.signature import WaveSignature
    from streamflow.store.errors import StoreError
    from streamflow.store.options import StoreOptions
    from streamflow.store.reports import StoreOutcome, StoreReport
    from streamflow.streamed import open_streamed
    from streamflow.warmup import WarmUpRecipe
    from streamflow.weights.topology import WeightTopology

__all__ = [
    "LoadInputs",
    "Offload",
    "OffloadConfig",
    "OffloadPlan",
    "OffloadStatistics",
    "RankGroups",
    "RankOptions",
    "StartedOffload",
    "StoreError",
    "StoreOptions",
    "StoreOutcome",
    "StoreReport",
    "StreamflowError",
    "WarmUpRecipe",
    "WaveSignature",
    "WeightTopology",
    "__version__",
    "offload",
    "open_offload",
    "open_streamed",
    "start_offload",
]

_HOMES = {
    "LoadInputs": "streamflow.host_weights.load_inputs",
    "Offload": "streamflow.runtime.offload",
    "OffloadConfig": "streamflow.config",
    "OffloadPlan": "streamflow.plan",
    "OffloadStatistics": "streamflow.runtime.statistics",
    "RankGroups": "streamflow.ranks.topology",
    "RankOptions": "streamflow.ranks.options",
    "StartedOffload": "streamflow.facade",
    "StoreError": "streamflow.store.errors",
    "StoreOptions": "streamflow.store.options",
    "StoreOutcome": "streamflow.store.reports",
    "StoreReport": "streamflow.store.reports",
    "StreamflowError": "streamflow.stages.errors",
    "WarmUpRecipe": "streamflow.warmup",
    "WaveSignature": "streamflow.stages.ranks.signature",
    "WeightTopology": "streamflow.weights.topology",
    "offload": "streamflow.facade",
    "open_offload": "streamflow.loaded",
    "open_streamed": "streamflow.streamed",
    "start_offload": "streamflow.facade",
}


if not TYPE_CHECKING:  # a type checker would take any name for one that is there

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
