"""Byte counts that do not change while an offload is open."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from streamflow.attachment import Attachment
from streamflow.component_parts import BoundComponent
from streamflow.pipelines.policy import Behaviour
from streamflow.store.reports import StoreReport


@attrs.frozen
class ComponentSizes:
    """One component: what it does (``behaviour``), its blocks, and the bytes of its weights.

    ``moving_bytes`` come to the device while the component is used, and go; ``fixed_bytes`` are always there.
    ``store``: what the host weight store did for it; None if it is off.
    """

    name: str
    behaviour: str
    num_blocks: int
    num_resident_blocks: int
    model_bytes: int
    block_bytes: int
    moving_bytes: int
    fixed_bytes: int
    host_image_bytes: int
    store: StoreReport | None


@attrs.frozen
class ModelSizes:
    """All components together, and each; see `OffloadStatistics`."""

    components: tuple[ComponentSizes, ...]
    num_blocks: int
    num_resident_blocks: int
    model_bytes: int
    block_bytes: int
    fixed_bytes: int
    host_image_bytes: int


def sizes_of(components: Sequence[BoundComponent], attachments: Sequence[Attachment]) -> ModelSizes:
    """The sizes of ``components``, which are attached."""
    each = tuple(map(_component_sizes, components, attachments))
    streamed = [sizes for sizes in each if sizes.behaviour == Behaviour.STREAMED]
    return ModelSizes(
        components=each,
        num_blocks=sum(sizes.num_blocks for sizes in streamed),
        num_resident_blocks=sum(sizes.num_resident_blocks for sizes in streamed),
        model_bytes=sum(sizes.model_bytes for sizes in each),
        block_bytes=sum(sizes.block_bytes for sizes in streamed),
        fixed_bytes=sum(sizes.fixed_bytes for sizes in each),
        host_image_bytes=sum(sizes.host_image_bytes for sizes in each),
    )


def _component_sizes(component: BoundComponent, attachment: Attachment) -> ComponentSizes:
    inventory = component.given.inventory
    owned = [*inventory.fixed, *(tensor for block in inventory.blocks for tensor in block.tensors)]
    streams = component.given.behaviour is Behaviour.STREAMED
    return ComponentSizes(
        name=component.name,
        behaviour=component.given.behaviour.value,
        num_blocks=len(inventory.blocks) if streams else 0,
        num_resident_blocks=len(component.given.residents),
        model_bytes=sum(tensor.tensor.numel() * tensor.tensor.element_size() for tensor in owned),
        block_bytes=inventory.streamable_bytes,
        moving_bytes=sum(image.nbytes for image in component.moving.values()),
        fixed_bytes=attachment.fixed.nbytes,
        host_image_bytes=component.source.host_image_bytes,
        store=component.given.store,
    )
