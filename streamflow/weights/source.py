"""The source of an open model's weights: what the offload needs of a loaded module, or of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from streamflow.binding.blocks import BoundBlock
from streamflow.binding.fixed import fill_from_module
from streamflow.binding.inventory import Inventory
from streamflow.stages.devices.base import Device
from streamflow.stages.host_memory import allocate_host
from streamflow.stages.images import BlockImage, view_of
from streamflow.stages.layout import ImageLayout, Region
from streamflow.stages.threads import ThreadCrew
from streamflow.transfer_choice import SourceName
from streamflow.weights.checkpoint import Checkpoint
from streamflow.weights.checkpoint_plan import CheckpointPlan
from streamflow.weights.file_extents import FileExtents
from streamflow.weights.module_source import PinnedImages, module_images
from streamflow.weights.pieces import checkpoint_block_pieces
from streamflow.weights.registering import RegisteredFiles, RegistrationOptions, RegistrationReport


class WeightSource(Protocol):
    """Where block images and fixed tensors come from.

    1. `prepare` is called once, before anything is bound; `images` and `fill` are valid from then on.
    2. `unregister` may be called then, before any image is read.
    3. `release` is called once nothing reads it any more.
    """

    @property
    def name(self) -> SourceName:
        """``artifact``, ``checkpoint`` or ``module``."""

    @property
    def reason(self) -> str:
        """Why this one."""

    @property
    def why_not_direct(self) -> str | None:
        """Why no block may be transferred directly, whatever its memory is like; None: it may."""

    @property
    def evidence(self) -> object:
        """A value for JSON that is equal to that of a source on the same node only where both have the same weights.

        None: there is no such value.
        """

    @property
    def registration(self) -> RegistrationReport:
        """What came of registering its files, once it is prepared."""

    @property
    def images(self) -> Mapping[int, BlockImage]:
        """The block images, by block. They may not be read after `release`."""

    def fill(self, layout: ImageLayout, region: Region, target: torch.Tensor) -> None:
        """Bring a region of the fixed tensors to ``target`` on the device. Blocks."""

    @property
    def host_image_bytes(self) -> int:
        """Private host memory held for images."""

    def is_in_module(self, name: str) -> bool:
        """Whether the module itself holds the real values of the fixed tensor of this name."""

    async def prepare(self, device: Device, crew: ThreadCrew) -> None:
        """Get ready; cancellable."""

    def read_tensor(self, block: int, name: str) -> torch.Tensor:
        """The real bytes of a streamed tensor, on the host. Not to be written. Blocks."""

    def unregister(self, reason: str) -> None:
        """Unlock the memory of the images, which are to be staged because of ``reason``: another rank must. Blocks.

        :raises StillRegisteredError: if the device keeps memory registered.
        :raises HostRegistrationError: if it does so with memory that is the module's own.
        """

    def release(self) -> None:
        """Give everything back. Idempotent.

        :raises StillRegisteredError: if the device keeps memory registered; all that is needed for it stays.
        """


class ModuleSource:
    """The tensors that are in the module, in place; or images of them, page-locked, where ``num_pin_threads`` is given.

    Page-locked images replace the tensors' own memory, and stay it after `release`.
    """

    name: SourceName = "module"
    evidence = None
    why_not_direct: str | None = None
    registration = RegistrationReport()

    def __init__(
        self, inventory: Inventory, blocks: Sequence[BoundBlock], reason: str, num_pin_threads: int | None
    ) -> None:
        self.reason = reason
        self._fill = fill_from_module(inventory.fixed)
        self._blocks = blocks
        self._num_pin_threads = num_pin_threads
        self._pinned: PinnedImages | None = None
        self.images: Mapping[int, BlockImage] = {}

    @property
    def host_image_bytes(self) -> int:
        return 0 if self._pinned is None else sum(image.nbytes for image in self.images.values())

    def is_in_module(self, name: str) -> bool:
        return True

    async def prepare(self, device: Device, crew: ThreadCrew) -> None:
        if self._num_pin_threads is None:
            self.images = module_images(self._blocks)
            return
        self._pinned = PinnedImages(device, self._blocks)
        await self._pinned.pack(crew, self._num_pin_threads)
        self.images = dict(sorted(self._pinned.images.items()))

    def fill(self, layout: ImageLayout, region: Region, target: torch.Tensor) -> None:
        self._fill(layout, region, target)

    def read_tensor(self, block: int, name: str) -> torch.Tensor:
        bound = self._blocks[block]
        return bound.host[bound.names.index(name)].detach()

    def unregister(self, reason: str) -> None:
        if self._pinned is not None:
            self.images = dict(sorted(self._pinned.pageable().items()))
            self.why_not_direct = reason

    def release(self) -> None:
        if self._pinned is not None:
            self._pinned.release()


class CheckpointSource:
    """The checkpoint's files, as the plan assigns them. It owns the open checkpoint.

    Their mappings are registered where ``options`` and the device allow it, and no adapter has to make a tensor.
    """

    name: SourceName = "checkpoint"
    host_image_bytes = 0

    def __init__(
        self,
        inventory: Inventory,
        blocks: Sequence[BoundBlock],
        checkpoint: Checkpoint,
        plan: CheckpointPlan,
        options: RegistrationOptions,
    ) -> None:
        self.reason = "every tensor of the model has exactly one source in the files" + _through_adapters(plan)
        self._checkpoint = checkpoint
        self._plan = plan
        self._fill_from_module = fill_from_module(inventory.fixed)
        self._registered = RegisteredFiles(options, owner=self)
        self.registration = RegistrationReport()
        self.images: dict[int, BlockImage] = {
            index: BlockImage(
                block.path, block.layout, checkpoint_block_pieces(block.layout, checkpoint, plan.assignments)
            )
            for index, block in enumerate(blocks)
        }

    @property
    def why_not_direct(self) -> str | None:
        return "checkpoint adapters make tensors whenever blocks are read" if self._plan.has_adapters else None

    @property
    def evidence(self) -> object:
        statuses = (file.status for file in self._checkpoint.files)
        return sorted([status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns] for status in statuses)

    def is_in_module(self, name: str) -> bool:
        return name not in self._plan.assignments

    async def prepare(self, device: Device, crew: ThreadCrew) -> None:
        if self.why_not_direct is not None:
            self.registration = RegistrationReport(problem=self.why_not_direct)
            return
        files = FileExtents()
        for image in self.images.values():
            files.add(image)
        mappings = await crew.call(files.map, name="mapping")
        self.registration = await self._registered.open(mappings, files.extents, device, crew)
        if self.registration.problem is None:
            for index, image in self.images.items():
                self.images[index] = files.registered(image, self._registered.runs)

    def fill(self, layout: ImageLayout, region: Region, target: torch.Tensor) -> None:
        """Bring a region of fixed tensors to the device; what no file holds (other buffers) from the module."""
        if self.is_in_module(region.names[0]):
            self._fill_from_module(layout, region, target)
            return
        views = tuple(view for view in layout.views if view.name in region.names)
        memory = allocate_host(region.nbytes)
        for piece in checkpoint_block_pieces(
            ImageLayout(views, (region,), region.nbytes), self._checkpoint, self._plan.assignments
        ):
            piece.read_into(memory.data_ptr(), 0, piece.nbytes)
        target.copy_(memory)

    def read_tensor(self, block: int, name: str) -> torch.Tensor:
        image = self.images[block]
        view = next(view for view in image.layout.views if view.name == name)
        region = next(region for region in image.layout.regions if name in region.names)
        memory = allocate_host(image.layout.nbytes)
        for piece in image.pieces:
            if piece.offset_bytes == region.offset_bytes:
                piece.read_into(memory.data_ptr() + piece.offset_bytes, 0, piece.nbytes)
        return view_of(memory, view)

    def unregister(self, reason: str) -> None:
        self._registered.close(retry=self.release)
        self.registration = RegistrationReport(problem=reason)

    def release(self) -> None:
        self._registered.close(retry=self.release)
        self._checkpoint.close()


def _through_adapters(plan: CheckpointPlan) -> str:
    adapted = [name for name, assignment in plan.assignments.items() if assignment.adapter is not None]
    return f", {len(adapted)} of them through checkpoint adapters" if adapted else ""
