"""Whether ranks that share no copy have the same weights: they compare digests of every tensor's elements."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from streamflow.ranks.agreement import Agreement, Refusal, StepRefusedError, together
from streamflow.ranks.equality import bytes_of_view
from streamflow.ranks.shared_images import as_error
from streamflow.ranks.shared_plan import describe_image, why_not_together
from streamflow.stages.images import BlockImage, MemoryPiece
from streamflow.stages.threads import ThreadCrew
from streamflow.weights.file_reading import memory_at
from streamflow.weights.many_threads import for_each

#: By the tensor's name.
Digests = dict[str, str]


async def check_equal_weights(
    component: str, images: Sequence[BlockImage], agreement: Agreement, crew: ThreadCrew, num_threads: int
) -> None:
    """Return if the tensors that ``images`` are over are the same on all ranks, bit by bit. Cancellable between images.

    :raises WeightsDifferError: if a rank has other tensors than rank 0, or other values in one: on all ranks alike.
    :raises SharedImagesError: if a rank cannot tell: on all ranks alike.
    """
    found: dict[str, Digests] = {}

    async def digest_all() -> list[list[Any]]:
        await for_each(images, lambda image: found.update({image.name: _digests_of(image)}), crew, num_threads)
        return [[*describe_image(image.name, image.layout), _digest_of(found[image.name])] for image in images]

    try:
        values = await together(agreement, f"weights of {component}: compare blocks", digest_all)
        refusal = why_not_together([{"where": {}, "images": [entry[:-1] for entry in value]} for value in values])
        if refusal is None:
            refusal = why_not_together([{"where": {}, "images": value} for value in values])
            refusal = refusal and await _with_tensor(refusal, component, found, agreement)
        if refusal is not None:
            raise StepRefusedError([refusal])
    except StepRefusedError as failure:
        raise as_error(component, failure) from failure.__cause__


async def _with_tensor(refusal: Refusal, component: str, found: dict[str, Digests], agreement: Agreement) -> Refusal:
    """``refusal`` because of what is in a block, with the tensor that it is."""
    digests = found[refusal.details["block"]]
    values = await agreement.agree(f"weights of {component}: compare tensors", digests)
    differing = (name for name in digests if values[0][name] != values[refusal.rank][name])
    return Refusal(refusal.rank, refusal.reason, {**refusal.details, "tensor": next(differing, None)})


def _digests_of(image: BlockImage) -> Digests:
    """Of the elements of each tensor. Blocks; for worker threads."""
    regions = [region for region in image.layout.regions if region.nbytes]
    homes = {name: at for at in zip(regions, image.pieces, strict=True) for name in at[0].names}
    digests = {}
    for view in image.layout.views:
        digest = hashlib.sha256()
        if view.name in homes:
            region, piece = homes[view.name]
            if not isinstance(piece, MemoryPiece):
                raise TypeError(f"{image.name} is not in memory")
            elements = bytes_of_view(view, region, piece.data).contiguous()
            digest.update(memory_at(elements.data_ptr(), elements.numel()))
        digests[view.name] = digest.hexdigest()
    return digests


def _digest_of(digests: Digests) -> str:
    return hashlib.sha256("".join(digests.values()).encode()).hexdigest()
