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
    from streamflow.loaded import open_offload
    from streamflow.plan import OffloadPlan
    from streamflow.runtime.offload import Offload
    from streamflow.runtime.statistics import OffloadStatistics
    from streamflow.stages.errors import StreamflowError
    from streamflow.streamed import open_streamed

__all__ = [
    "Offload",
    "OffloadConfig",
    "OffloadPlan",
    "OffloadStatistics",
    "StartedOffload",
    "StreamflowError",
    "__version__",
    "offload",
    "open_offload",
    "open_streamed",
    "start_offload",
]

_HOMES = {
    "Offload": "streamflow.runtime.offload",
    "OffloadConfig": "streamflow.config",
    "OffloadPlan": "streamflow.plan",
    "OffloadStatistics": "streamflow.runtime.statistics",
    "StartedOffload": "streamflow.facade",
    "StreamflowError": "streamflow.stages.errors",
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
