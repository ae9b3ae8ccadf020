"""What compute threads tell a residency. Frozen values; none owns a resource."""

from __future__ import annotations

import attrs

from streamflow.stages.devices.base import Event
from streamflow.stages.places import Place


@attrs.frozen
class Asked:
    """``place`` waits for ``component``; the answer carries ``ticket``. ``keep``: see `ResidencyLedger.ask`."""

    place: Place
    component: str
    keep: bool
    ticket: int


@attrs.frozen
class Released:
    """The place's work with ``component`` is queued, and done when ``event`` happens."""

    place: Place
    component: str
    event: Event


@attrs.frozen
class Withdrawn:
    """The place's request is over; all its work is done when ``events`` have happened."""

    place: Place
    events: tuple[Event, ...]


@attrs.frozen
class CallFailed:
    """A call of ``component`` failed by ``error``."""

    component: str
    error: BaseException


#: What compute threads ring the doorbell of a residency with.
Message = Asked | Released | Withdrawn | CallFailed
