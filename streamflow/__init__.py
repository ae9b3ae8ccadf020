"""streamflow streams the weights of models that do not fit on the accelerator; outputs are byte-identical."""

from streamflow._version import __version__
from streamflow.config import OffloadConfig
from streamflow.facade import StartedOffload, offload, start_offload
from streamflow.opening import open_offload
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
