"""What an offload is and did, as a frozen snapshot."""

from __future__ import annotations

import attrs

from streamflow.runtime.admission import Occupancy
from streamflow.runtime.outcomes import RequestOutcomes
from streamflow.runtime.sizes import ComponentSizes
from streamflow.stages.statistics import EngineStatistics
from streamflow.store.reports import StoreReport
from streamflow.transfer_choice import TransferChoice
from streamflow.weights.registering import RegistrationReport


@attrs.frozen
class StagingStatistics:
    """What components that move have on the device: now, at most, and what they may (None: no limit), in bytes.

    ``num_waiting``: requests that wait for a component.
    """

    staged_bytes: int
    staged_peak_bytes: int
    budget_bytes: int | None
    num_waiting: int


@attrs.frozen
class OffloadStatistics:
    """A snapshot of an offload. Bytes are bytes, times are seconds of host time.

    ``model_bytes``: all weights of the model. ``fixed_bytes``: device bytes of what is outside the blocks (0 on a host
    device, where it stays in place). ``host_image_bytes``: private host memory that streamflow itself holds for the
    blocks. ``components`` has the same for each component, and ``staging`` says what of them moves (None: nothing).
    ``num_running`` and ``num_waiting`` are requests and direct calls; ``occupancy`` says which, in their order.
    ``serialised_by``: modules that keep state between calls, for whose sake one request at a time uses their component,
    each with the reason.
    """

    state: str
    device: str
    choice: TransferChoice
    store: StoreReport | None
    registration: RegistrationReport
    components: tuple[ComponentSizes, ...]
    num_blocks: int
    num_resident_blocks: int
    model_bytes: int
    block_bytes: int
    fixed_bytes: int
    host_image_bytes: int
    num_running: int
    num_waiting: int
    occupancy: Occupancy
    outcomes: RequestOutcomes
    serialised_by: tuple[str, ...]
    staging: StagingStatistics | None
    engine: EngineStatistics
