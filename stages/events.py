"""What the parts of the engine tell each other, and their observers. Frozen values; none owns a resource.

Times are not in the events: an observer that needs them reads its own clock when it is told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from streamflow.stages.ranks.signature import WaveSignature
from streamflow.stages.retention import Retention

if TYPE_CHECKING:
    from streamflow.stages.devices.base import Event


@attrs.frozen
class RequestStarted:
    """A request, or a direct call of the model (None), occupies the place of this index."""

    request_id: str | None
    place: int


@attrs.frozen
class RequestEnded:
    """It left the place. ``maker``: what its passes were made by."""

    request_id: str | None
    place: int
    maker: int


@attrs.frozen
class PassStarted:
    """A pass entered ``component`` and waits for a walk. ``maker`` is the same for all passes of a request.

    ``request_id`` None: the model was called directly. ``alone``: no other request may be in the component meanwhile.
    ``wave``: what the request said of the wave that it needs; None: nothing.
    """

    pass_id: int
    component: str
    maker: int
    request_id: str | None
    alone: bool
    wave: WaveSignature | None = None


@attrs.frozen
class BlockWanted:
    """A pass stands before ``block``, which it was not told of, and waits for an answer to ``serial``."""

    pass_id: int
    block: int
    serial: int


@attrs.frozen
class BlockLeft:
    """A pass issued all work of ``block``, done when ``event`` happens; it will not take the blocks ``passed_by``."""

    pass_id: int
    block: int
    passed_by: tuple[int, ...]
    event: Event


@attrs.frozen
class PassEnded:
    """A pass is over; all its work is done when ``event`` happens. ``completed``: it did not fail."""

    pass_id: int
    completed: bool
    event: Event


@attrs.frozen
class DeviceFailed:
    """A pass met a failure of work that the device had queued: no block can be trusted any more."""

    error: BaseException


@attrs.frozen
class LinkTurn:
    """The link, which others use too, is the engine's for its next fetch."""


@attrs.frozen
class WaveNews:
    """The ranks agreed on something: it is to be decided anew what follows."""


@attrs.frozen
class BlockArrived:
    """A copy into ``slot`` happened, and the next ones wait for that: no pass of this rank sets their pace."""

    slot: int
    generation: int


@attrs.frozen
class BlockReady:
    """``pass_id`` may run ``block`` from ``slot`` (at ``generation``) once the device event ``event`` has happened."""

    pass_id: int
    block: int
    slot: int
    generation: int
    serial: int
    rank: int
    event: Event


@attrs.frozen
class PassRefused:
    """A pass gets no block any more, but ``error``: it does not fit into its wave."""

    pass_id: int
    error: Exception


@attrs.frozen
class WalkStarted:
    """A walk over ``component`` began, for these passes."""

    walk_id: int
    component: str
    pass_ids: tuple[int, ...]


@attrs.frozen
class WalkJoined:
    """These passes joined a walk that had just begun."""

    walk_id: int
    pass_ids: tuple[int, ...]


@attrs.frozen
class WalkEnded:
    """The last pass of a walk is over."""

    walk_id: int


@attrs.frozen
class FetchStarted:
    """A block's bytes are on their way into a slot. ``on_demand``: nothing had foreseen it."""

    block: int
    slot: int
    generation: int
    nbytes: int
    on_demand: bool


@attrs.frozen
class FetchIssued:
    """All copies of a fetch are queued on the device; ``event`` happens when the slot holds the block."""

    block: int
    slot: int
    generation: int
    event: Event


@attrs.frozen
class FetchFailed:
    """A fetch failed; the offload is broken."""

    block: int
    error: BaseException


@attrs.frozen
class SlotFree:
    """``slot`` gave up ``block``: every pass that used it has left, and their events are waited for on the device."""

    slot: int
    block: int


@attrs.frozen
class SlowDeviceCall:
    """A device call made on the event loop took long (``seconds``), so the loop was late by as much."""

    what: str
    seconds: float


@attrs.frozen
class EngineFailed:
    """The engine is broken by ``error`` and serves no more."""

    error: BaseException


@attrs.frozen
class ComponentArrived:
    """A component that moves as a whole is on the device; with it ``staged_bytes`` of such components are."""

    component: str
    nbytes: int
    staged_bytes: int


@attrs.frozen
class ComponentLeft:
    """Its device memory is free again; ``staged_bytes`` of others are still there."""

    component: str
    nbytes: int
    staged_bytes: int


@attrs.frozen
class ComponentFailed:
    """A component could not come to the device, or a call of it failed there."""

    component: str
    error: BaseException
    staged_bytes: int


@attrs.frozen
class CacheDecided:
    """What is done with the allocator's cache, decided at a component boundary or by force."""

    retention: Retention


#: What the engine's doorbell is rung with, by passes above all.
PassMessage = (
    RequestStarted
    | RequestEnded
    | PassStarted
    | BlockWanted
    | BlockLeft
    | PassEnded
    | DeviceFailed
    | EngineFailed
    | LinkTurn
    | WaveNews
    | BlockArrived
)
#: What observers are told.
ObservedEvent = (
    RequestStarted
    | RequestEnded
    | PassStarted
    | BlockWanted
    | BlockLeft
    | PassEnded
    | DeviceFailed
    | LinkTurn
    | WaveNews
    | BlockArrived
    | PassRefused
    | WalkStarted
    | WalkJoined
    | WalkEnded
    | FetchStarted
    | FetchIssued
    | FetchFailed
    | SlotFree
    | SlowDeviceCall
    | EngineFailed
    | ComponentArrived
    | ComponentLeft
    | ComponentFailed
    | CacheDecided
)
