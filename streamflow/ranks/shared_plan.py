"""Whether ranks can share one host copy: they must be able to find it, and need the same of it. Pure: no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from streamflow.ranks.agreement import Refusal
from streamflow.stages.layout import ImageLayout


def describe_image(name: str, layout: ImageLayout) -> list[Any]:
    """Name, size and a digest of what an image holds and where: equal where the images of two ranks can be one."""
    views = [attrs.astuple(view) for view in layout.views]
    regions = [(region.offset_bytes, region.nbytes, region.names) for region in layout.regions]
    digest = hashlib.sha256(json.dumps([views, regions]).encode()).hexdigest()
    return [name, layout.nbytes, digest]


def why_not_together(plans: Sequence[Mapping[str, Any]]) -> Refusal | None:
    """What keeps the ranks of these plans (as each has told them) from sharing; None if nothing does.

    Where a rank has other images than rank 0, ``details`` of it are the fields of a `WeightsDifferError`.
    """
    first = plans[0]
    for rank, plan in enumerate(plans):
        for what, value in plan["where"].items():
            if value != first["where"][what]:
                reason = (
                    f"its {what} is {value} and rank 0's is {first['where'][what]}, so that it finds no memory of it"
                )
                return Refusal(rank, reason)
        if plan["images"] != first["images"]:
            names = [[name for name, *_ in images] for images in (first["images"], plan["images"])]
            block = _first_other(first["images"], plan["images"]) if names[0] == names[1] else None
            return Refusal(rank, "its images are others than rank 0's", {"rank": rank, "block": block, "tensor": None})
    return None


def _first_other(images: Sequence[Sequence[Any]], others: Sequence[Sequence[Any]]) -> str:
    return next(str(other[0]) for image, other in zip(images, others, strict=True) if image != other)
