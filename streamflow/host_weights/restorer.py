"""The restorer: gives a model the weights of a lease.

1. `check_restorable` only compares: what the model needs against what the entry says it holds. Nothing changes.
2. `ArtifactSource` is the commit: from its `prepare` on, blocks and fixed tensors come from the lease, which it owns.
3. `release` closes the lease, once nothing reads it any more.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from streamflow.binding.blocks import BoundBlock
from streamflow.host_weights.errors import AmbiguousOwnershipError
from streamflow.host_weights.ownership import Ownership
from streamflow.stages.devices.base import Device
from streamflow.stages.host_memory import allocate_host
from streamflow.stages.images import BlockImage, view_of
from streamflow.stages.layout import ImageLayout, Region
from streamflow.stages.registration.plan import Extent
from streamflow.stages.threads import ThreadCrew
from streamflow.store.draft import StoredImage
from streamflow.store.lease import Lease
from streamflow.transfer_choice import SourceName
from streamflow.weights.pieces import PieceInFile
from streamflow.weights.registering import RegisteredFiles, RegistrationOptions, RegistrationReport


def check_restorable(ownership: Ownership, lease: Lease) -> None:
    """Return if the entry holds exactly the tensors that the model needs, each as the model needs it: then image ``i``
    of the entry is image ``i`` of the ownership.

    :raises AmbiguousOwnershipError: if not: the finished model is not the one that was stored.
    """
    stored = [stored.image for stored in lease.manifest.images]
    differences = list(_differences(ownership.images, stored))
    if differences:
        raise AmbiguousOwnershipError(lease.content_id, differences)


def _differences(needed: Sequence[StoredImage], stored: Sequence[StoredImage]) -> list[str]:
    if [image.name for image in needed] != [image.name for image in stored]:
        return [f"the model has the images {[i.name for i in needed]} and the entry {[i.name for i in stored]}"]
    found = []
    for ours, theirs in zip(needed, stored, strict=True):
        if ours != theirs:
            of_ours, of_theirs = set(ours.tensors), set(theirs.tensors)
            names = sorted({tensor.name for tensor in of_ours ^ of_theirs})
            found.append(
                f"{ours.name}: {', '.join(names[:5]) or 'its size'} differ" + ("..." if len(names) > 5 else "")
            )
    return found


@attrs.frozen
class ArtifactPiece(PieceInFile):
    """A block image as it lies in the entry's file."""

    lease: Lease
    image: int
    nbytes: int
    offset_bytes: int = 0
    registered: list[torch.Tensor] | None = attrs.field(default=None, eq=False, repr=False)

    def read_into(self, address: int, start: int, nbytes: int) -> None:
        """Put bytes of the image at ``address``. Blocks; for worker threads.

        :raises SourceReadError: if the file shrank or cannot be read.
        """
        self.lease.read_into(self.image, address, start, nbytes)


class ArtifactSource:
    """The images of an entry that was found restorable. It owns the lease, and registers its mappings where ``options``
    and the device allow it.

    ``in_module``: the module itself shows the entry's weights (its tensors were remapped), so that on a host device the
    fixed ones can stay where they are.
    """

    name: SourceName = "artifact"
    why_not_direct = None
    host_image_bytes = 0

    def __init__(
        self,
        blocks: Sequence[BoundBlock],
        lease: Lease,
        ownership: Ownership,
        options: RegistrationOptions,
        reason: str,
        *,
        in_module: bool,
    ) -> None:
        self.reason = reason
        self.lease = lease
        self._in_module = in_module
        self._blocks = blocks
        self._fixed_image = len(blocks)
        self._fixed_regions = _regions_by_name(ownership.layouts[self._fixed_image])
        self._registered = RegisteredFiles(options, owner=self)
        self.registration = RegistrationReport()
        self.images: dict[int, BlockImage] = {
            index: BlockImage(block.path, block.layout, _pieces(lease, index, block.layout))
            for index, block in enumerate(blocks)
        }

    @property
    def evidence(self) -> object:
        return self.lease.content_id

    def is_in_module(self, name: str) -> bool:
        return self._in_module

    async def prepare(self, device: Device, crew: ThreadCrew) -> None:
        places = {index: self.lease.place(index) for index, image in self.images.items() if image.nbytes}
        files = sorted({place.file for place in places.values()})
        mappings = await crew.call(lambda: [self.lease.mapping(file) for file in files], name="mapping")
        extents = {
            index: Extent(files.index(place.file), place.offset_bytes, place.nbytes) for index, place in places.items()
        }
        self.registration = await self._registered.open(mappings, [*extents.values()], device, crew)
        if self.registration.problem is None:
            for index, extent in extents.items():
                self.images[index] = _registered(self.images[index], self._registered.runs(extent))

    def fill(self, layout: ImageLayout, region: Region, target: torch.Tensor) -> None:
        stored = self._fixed_regions[region.names[0]]
        memory = allocate_host(region.nbytes)
        self.lease.read_into(self._fixed_image, memory.data_ptr(), stored.offset_bytes, region.nbytes)
        target.copy_(memory)

    def read_tensor(self, block: int, name: str) -> torch.Tensor:
        layout = self._blocks[block].layout
        view = next(view for view in layout.views if view.name == name)
        memory = allocate_host(layout.nbytes)
        self.lease.read_into(block, memory.data_ptr(), 0, layout.nbytes)
        return view_of(memory, view)

    def unregister(self, reason: str) -> None:
        self._registered.close(retry=self.release)
        self.registration = RegistrationReport(problem=reason)

    def release(self) -> None:
        self._registered.close(retry=self.release)
        self.lease.close()


def _registered(image: BlockImage, runs: list[torch.Tensor]) -> BlockImage:
    """``image`` where it lies in a registered mapping."""
    pieces = tuple(attrs.evolve(piece, registered=runs) for piece in image.pieces if isinstance(piece, ArtifactPiece))
    return attrs.evolve(image, pieces=pieces)


def _pieces(lease: Lease, index: int, layout: ImageLayout) -> tuple[ArtifactPiece, ...]:
    return (ArtifactPiece(lease, index, layout.nbytes),) if layout.nbytes else ()


def _regions_by_name(layout: ImageLayout) -> dict[str, Region]:
    return {name: region for region in layout.regions for name in region.names}
