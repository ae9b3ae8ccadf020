"""The loaded module of every rank as one source: all ranks of a node stream from one host copy that they share."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import attrs
import torch

from streamflow.binding.blocks import BoundBlock
from streamflow.binding.fixed import Fill, fill_from_module
from streamflow.binding.inventory import Inventory, OwnedTensor
from streamflow.host_weights.ownership import FIXED
from streamflow.host_weights.remapping import give_memory_back, show, views_of_image
from streamflow.ranks.agreement import Agreement
from streamflow.ranks.decisions import agree_on_registration
from streamflow.ranks.equal_weights import check_equal_weights
from streamflow.ranks.errors import SharedImagesError
from streamflow.ranks.shared_images import SharedImages, open_shared_images
from streamflow.stages.devices.base import Device
from streamflow.stages.host_memory import allocate_host
from streamflow.stages.images import BlockImage
from streamflow.stages.layout import ImageLayout, Region, plan_layout
from streamflow.stages.registration.plan import Extent
from streamflow.stages.threads import ThreadCrew
from streamflow.weights.anonymous_file import AnonymousFile
from streamflow.weights.module_source import memory_pieces, module_images
from streamflow.weights.pieces import PieceInFile
from streamflow.weights.registering import RegisteredFiles, RegistrationOptions, RegistrationReport
from streamflow.weights.source import ModuleSource

_log = logging.getLogger(__name__)


class SharingOptions(RegistrationOptions, Protocol):
    """The options that say how; `OffloadConfig` has them."""

    @property
    def effective_packing_threads(self) -> int: ...


@attrs.frozen
class SharingReport:
    """What came of sharing a component's weights among the ranks of a group, the same on each of them.

    ``shared_bytes`` lie in the one copy of all ranks. ``failure`` is why there is none, so that each rank has its own
    weights, the same as the others'.
    """

    shared_bytes: int = 0
    failure: SharedImagesError | None = None


@attrs.frozen
class SharedPiece(PieceInFile):
    """A block image as it lies in the shared copy, at ``file_offset``."""

    file: AnonymousFile
    file_offset: int
    nbytes: int
    offset_bytes: int = 0
    registered: list[torch.Tensor] | None = attrs.field(default=None, eq=False, repr=False)

    def read_into(self, address: int, start: int, nbytes: int) -> None:
        """Put bytes of the image at ``address``. Blocks; for worker threads."""
        self.file.read_into(address, self.file_offset + start, nbytes)


class SharedModuleSource(ModuleSource):
    """The tensors that are in the module, in one host copy that the ranks of ``agreement`` share, each of which has
    loaded ``component`` itself; or, where they cannot share, each in its own, as `ModuleSource` has them, once it is
    known that they are the same.

    Blocks stream from the copy, page-locked on all ranks or on none. The module's tensors show it, too, through a
    private mapping: they read as before while the offload is open, and once it is closed they may be written. What is
    not shared: tensors outside the blocks that are in no state dict.

    ``is_required``: not to share is an error; to have different weights always is. ``num_pin_threads`` is for images of
    this rank alone.
    """

    def __init__(
        self,
        component: str,
        inventory: Inventory,
        blocks: Sequence[BoundBlock],
        reason: str,
        agreement: Agreement,
        options: SharingOptions,
        *,
        num_pin_threads: int | None,
        is_required: bool = False,
    ) -> None:
        super().__init__(inventory, blocks, reason, num_pin_threads)
        self.registration = RegistrationReport()
        self.sharing = SharingReport()
        self._component = component
        self._inventory = inventory
        self._shared_fixed = _shareable(inventory.fixed)
        self._fixed_layout = plan_layout(owned.spec for owned in self._shared_fixed)
        self._agreement = agreement
        self._options = options
        self._is_required = is_required
        self._device_is_host = False
        self._shared: SharedImages | None = None
        self._registered = RegisteredFiles(options, owner=self, in_memory=True)

    async def prepare(self, device: Device, crew: ThreadCrew) -> None:
        """Share, or do as `ModuleSource` does. Cancellable; whatever happens, the module has its weights.

        :raises SharedImagesError: if the ranks cannot share and have to; on all of them alike.
        :raises WeightsDifferError: if they have different weights; on all of them alike.
        """
        self._device_is_host = device.is_host
        shared = await self._share(crew)
        if shared is None:
            await self._check_equal(crew)
            await super().prepare(device, crew)
            return
        await crew.call(give_memory_back, name="giving memory back")
        await self._register(shared, device, crew)

    async def _share(self, crew: ThreadCrew) -> SharedImages | None:
        """The copy, which the module's tensors show; None, with `sharing` saying why: there is none."""
        try:
            shared = await self._open(crew)
        except SharedImagesError as failure:
            if self._is_required:
                raise
            _log.warning("each rank keeps its own weights of %s: %s", self._component, failure)
            failure.__cause__ = failure.__context__ = None  # their frames have the tensors, and would keep them
            self.sharing = SharingReport(failure=failure.with_traceback(None))
            return None
        self._shared = shared
        await crew.call(lambda: self._show(shared), name="remapping")
        self.sharing = SharingReport(shared.layout.nbytes)
        return shared

    async def _open(self, crew: ThreadCrew) -> SharedImages:
        threads = self._options.effective_packing_threads
        return await open_shared_images(self._component, self._own_images(), self._agreement, crew, threads)

    async def _check_equal(self, crew: ThreadCrew) -> None:
        threads = self._options.effective_packing_threads
        await check_equal_weights(self._component, self._own_images(), self._agreement, crew, threads)

    def _own_images(self) -> tuple[BlockImage, ...]:
        """What is to be shared, where it lies in the module's tensors."""
        tensors = {owned.name: owned.tensor.data for owned in self._shared_fixed}
        fixed = BlockImage(FIXED, self._fixed_layout, memory_pieces(self._fixed_layout, tensors))
        return (*module_images(self._blocks).values(), fixed)

    def _show(self, shared: SharedImages) -> None:
        """Point the module's tensors at the copy; nothing can fail here on one rank alone."""
        layouts = [*(block.layout for block in self._blocks), self._fixed_layout]
        with torch.inference_mode(False):
            views = [
                dict(views_of_image(layout, shared.private[offset : offset + layout.nbytes]))
                for layout, offset in zip(layouts, shared.layout.offsets, strict=True)
            ]
            for block, host in zip(self._blocks, views, strict=False):
                block.replace_host([host[name] for name in block.names])
        show(self._shared_fixed, views[-1])
        own = [owned for owned in self._inventory.fixed if owned not in self._shared_fixed]
        self._fill = _fill_from_copy(shared, self._fixed_layout, fill_from_module(own))

    async def _register(self, shared: SharedImages, device: Device, crew: ThreadCrew) -> None:
        places = {
            index: Extent(0, offset, block.layout.nbytes)
            for index, (block, offset) in enumerate(zip(self._blocks, shared.layout.offsets, strict=False))
        }
        self.registration = await self._registered.open([shared.mapping], [*places.values()], device, crew)
        problem = await agree_on_registration(self._agreement, self._component, self.registration)
        if problem is not None:
            await crew.call(lambda: self.unregister(problem), name="unregistering")
        self.images = {
            index: BlockImage(block.path, block.layout, self._pieces(shared, places[index]))
            for index, block in enumerate(self._blocks)
        }

    def _pieces(self, shared: SharedImages, place: Extent) -> tuple[SharedPiece, ...]:
        if not place.nbytes:
            return ()
        registered = self._registered.runs(place) if self.registration.problem is None else None
        return (SharedPiece(shared.file, place.offset_bytes, place.nbytes, registered=registered),)

    def unregister(self, reason: str) -> None:
        if self._shared is None:
            super().unregister(reason)
            return
        self._registered.close(retry=self.release)
        self.registration = RegistrationReport(problem=reason)
        self.why_not_direct = None if self._device_is_host else reason  # the host reads any memory

    def release(self) -> None:
        """As `ModuleSource` does; the module's tensors go on showing the copy, which goes with the last of them."""
        if self._shared is None:
            super().release()
            return
        self._registered.close(retry=self.release)
        self._shared.close()


def _fill_from_copy(shared: SharedImages, fixed: ImageLayout, fill_others: Fill) -> Fill:
    """A fill from the copy, whose last image is that of the fixed tensors; ``fill_others`` has those not in it."""
    places = {name: region.offset_bytes for region in fixed.regions for name in region.names}

    def fill(layout: ImageLayout, region: Region, target: torch.Tensor) -> None:
        if region.names[0] not in places:
            fill_others(layout, region, target)
            return
        memory = allocate_host(region.nbytes)
        start = shared.layout.offsets[-1] + places[region.names[0]]
        shared.file.read_into(memory.data_ptr(), start, region.nbytes)
        target.copy_(memory)

    return fill


def _shareable(fixed: Sequence[OwnedTensor]) -> tuple[OwnedTensor, ...]:
    """Those that have the same values on every rank, which other buffers need not, nor what shares memory with one."""
    own = {owned.spec.storage for owned in fixed if not owned.streamable}
    return tuple(owned for owned in fixed if owned.streamable and owned.spec.storage not in own)
