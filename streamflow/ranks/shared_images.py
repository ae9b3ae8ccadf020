"""One host copy of the images of all ranks of a group, each of which has loaded them: packed together, and compared.

1. The ranks see that they are to share the same, on one machine; rank 0 makes a file in memory, which they all open.
2. Each packs its part of it from its own tensors.
3. Each seals it, maps it, and compares all of its own tensors with it.

All ranks take a step or all give the copy up; until the last one, none has changed anything of its own. Meanwhile the
machine holds one copy more than there are ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import attrs

from streamflow.host_limits import available_host_bytes
from streamflow.host_weights.remapping import private_mapping
from streamflow.ranks.agreement import Agreement, DetailedError, StepRefusedError, together
from streamflow.ranks.equality import differing_tensor
from streamflow.ranks.errors import SharedImagesError, WeightsDifferError
from streamflow.ranks.shared_layout import Part, SharedLayout, lay_out, parts_between, share_of
from streamflow.ranks.shared_plan import describe_image, why_not_together
from streamflow.stages.images import BlockImage
from streamflow.stages.progress import progress
from streamflow.stages.threads import ThreadCrew
from streamflow.weights.anonymous_file import AnonymousAddress, AnonymousFile, process_namespace
from streamflow.weights.file_mapping import FileMapping
from streamflow.weights.many_threads import for_each

Item = TypeVar("Item")

#: What one thread packs or compares at a time; a cancellation waits for that.
PART_BYTES = 16 << 20


@attrs.frozen(eq=False)
class SharedImages:
    """The images of a group's shared copy, at the offsets of ``layout``. It owns file and mapping until `close`.

    ``private`` is all of it once more, mapped copy-on-write: for the tensors of a module, which keep it alive.
    """

    layout: SharedLayout
    file: AnonymousFile
    mapping: FileMapping
    private: memoryview

    def close(self) -> None:
        """Unmap and close: no descriptor of the copy is left here. What shows the private mapping goes on showing it,
        and is all that keeps it. Idempotent.

        :raises CheckpointInUseError: if views of the mapping are alive.
        """
        self.mapping.close()
        self.private.release()
        self.file.close()


async def open_shared_images(
    component: str, images: Sequence[BlockImage], agreement: Agreement, crew: ThreadCrew, num_threads: int
) -> SharedImages:
    """The shared copy of ``images``, which lie in this rank's own tensors and equal the copy's. Cancellable.

    :raises SharedImagesError: if a rank cannot take a step: on all ranks alike, and nothing is left of the copy.
    :raises WeightsDifferError: if a rank has other tensors than rank 0, or one has other bytes: on all ranks alike.
    """
    opening = _Opening(component, images, agreement, crew, num_threads)
    try:
        return await opening.run()
    except BaseException as failure:
        await crew.call_through(opening.undo.close)
        if isinstance(failure, StepRefusedError):
            raise as_error(component, failure) from failure.__cause__
        raise


def as_error(component: str, failure: StepRefusedError) -> SharedImagesError | WeightsDifferError:
    """What a refused step means to who wanted it; ``details`` of a refusal are the fields of a `WeightsDifferError`."""
    for refusal in failure.refusals:
        if refusal.details is None:
            return SharedImagesError(component, refusal.rank, refusal.reason)
    return WeightsDifferError(component, **failure.refusals[0].details)


class _Opening:
    """The steps of one rank; ``undo`` gives back what they have made."""

    #: Rank 0 has it from the first step on, the others from the second.
    _file: AnonymousFile
    #: From the last step on.
    _mapping: FileMapping
    _private: memoryview

    def __init__(
        self, component: str, images: Sequence[BlockImage], agreement: Agreement, crew: ThreadCrew, num_threads: int
    ) -> None:
        self.undo = ExitStack()
        self._component = component
        self._images = images
        self._agreement = agreement
        self._crew, self._num_threads = crew, num_threads
        self._layout = lay_out([image.nbytes for image in images])

    async def run(self) -> SharedImages:
        plans = await self._step("plan", partial(self._crew.call, self._plan))
        refusal = why_not_together(plans)
        if refusal is not None:
            raise StepRefusedError([refusal])
        address = AnonymousAddress(**plans[0]["address"])
        await self._step("open", partial(self._crew.call, partial(self._open, address)))
        await self._step("pack", self._pack)
        await self._step("compare", self._compare)
        return SharedImages(self._layout, self._file, self._mapping, self._private)

    async def _step(self, name: str, step: Callable[[], Awaitable[object]]) -> list[Any]:
        return await together(self._agreement, f"shared copy of {self._component}: {name}", step)

    def _plan(self) -> Mapping[str, Any]:
        wanted, available = self._layout.nbytes, available_host_bytes()
        if available is not None and wanted > available:
            raise MemoryError(f"the copy has {wanted:,} bytes, and {available:,} are available")
        address = None
        if self._agreement.rank == 0:
            self._use(AnonymousFile.create(f"streamflow {self._component}", wanted))
            address = attrs.asdict(self._file.address)
        images = [describe_image(image.name, image.layout) for image in self._images]
        return {"where": process_namespace(), "images": images, "address": address}

    def _open(self, address: AnonymousAddress) -> None:
        if self._agreement.rank != 0:
            self._use(AnonymousFile.open_at(address))

    def _use(self, file: AnonymousFile) -> None:
        self._file = file
        self.undo.callback(file.close)

    async def _pack(self) -> None:
        start, end = share_of(self._agreement.rank, self._agreement.size, self._layout.nbytes)
        if start == end:
            return
        writing = ExitStack()
        try:
            base = await self._crew.call(lambda: writing.enter_context(self._file.writing(start, end - start)))

            def pack(part: Part) -> None:
                piece = self._images[part.image].pieces[part.piece]
                piece.read_into(base + part.offset - start, part.start, part.nbytes)

            await self._for_each_part(self._parts_of(self._agreement.rank), pack, "packing the ranks' shared copy")
        finally:
            await self._crew.call_through(writing.close)

    async def _compare(self) -> None:
        await self._crew.call(self._map)
        parts = [(packer, part) for packer in range(self._agreement.size) for part in self._parts_of(packer)]

        def compare(packed: tuple[int, Part]) -> None:
            packer, part = packed
            image = self._images[part.image]
            name = differing_tensor(image, part, self._mapping.address, self._file.read_into)
            if name is not None:
                # rank 0's are the weights to have: whoever differs from it is named, packer or not
                rank = self._agreement.rank or packer
                raise DetailedError(f"{name} differs", {"rank": rank, "block": image.name, "tensor": name})

        await self._for_each_part(parts, compare, "comparing with the ranks' shared copy")

    def _map(self) -> None:
        self._file.seal()
        self._mapping = self._file.map()
        self.undo.callback(self._mapping.close)
        self._private = private_mapping(self._file.fileno())
        self.undo.callback(self._private.release)

    def _parts_of(self, rank: int) -> list[Part]:
        start, end = share_of(rank, self._agreement.size, self._layout.nbytes)
        pieces = [[(piece.offset_bytes, piece.nbytes) for piece in image.pieces] for image in self._images]
        return list(parts_between(pieces, self._layout, start, end, max_bytes=PART_BYTES))

    async def _for_each_part(self, parts: Sequence[Item], work: Callable[[Item], None], what: str) -> None:
        num_done = itertools.count(1)

        def do(part: Item) -> None:
            work(part)
            progress(what, next(num_done), len(parts))

        await for_each(parts, do, self._crew, self._num_threads)
