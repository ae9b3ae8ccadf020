"""What the ranks of a gather group move together, as one digest to compare. Pure: no torch, no clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import attrs

from streamflow.host_weights.plain_values import digest_of, plain
from streamflow.stages.layout import ImageLayout


class ScheduledImage(Protocol):
    """What of a `BlockImage` decides what is gathered."""

    @property
    def name(self) -> str: ...
    @property
    def layout(self) -> ImageLayout: ...


def schedule_digest(
    components: Mapping[str, Sequence[ScheduledImage]], *, local: Collection[str], chunk_bytes: int, size: int
) -> str:
    """SHA-256, in hex, of what a walk over each component moves: equal on two ranks only if they gather alike.

    ``components``: the streamed blocks of each in their fixed order. ``local``: the names of images that are fetched
    whole. ``chunk_bytes`` is the option, ``size`` the number of ranks.

    :raises ValueError: if ``local`` names what is no image.
    """
    names = {image.name for images in components.values() for image in images}
    unknown = sorted(set(local) - names)
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: not among the streamed blocks {', '.join(sorted(names))}")
    document = {
        "size": size,
        "chunk_bytes": chunk_bytes,
        "components": [
            [name, [_image(image, whole=image.name in local) for image in images]]
            for name, images in components.items()
        ],
    }
    return digest_of(document)


def _image(image: ScheduledImage, *, whole: bool) -> list[Any]:
    views = [plain(attrs.asdict(view), image.name) for view in image.layout.views]
    return [image.name, image.layout.nbytes, whole, views]
