"""Which tensors of a model a stored entry holds, and where: one image for each block and one for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import attrs
import torch
from torch import nn

from streamflow.binding.inventory import Inventory, OwnedTensor
from streamflow.host_weights.errors import NotStorableError
from streamflow.stages.layout import ImageLayout, Region, plan_layout
from streamflow.store.codes import StoreCode
from streamflow.store.draft import StoredImage, StoredTensor
from streamflow.weights.strides import is_overlapping

#: The name of the image that holds what is outside the blocks.
FIXED = "(fixed)"


@attrs.frozen(eq=False)
class Ownership:
    """The images of a model's store entry, blocks first, and the layout of each.

    Every parameter and buffer of the model is in exactly one; further names of a tensor are its aliases.
    """

    images: tuple[StoredImage, ...]
    layouts: tuple[ImageLayout, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all images."""
        return sum(image.nbytes for image in self.images)


def ownership_of(model: nn.Module, inventory: Inventory) -> Ownership:
    """The ownership of ``model``, whose tensors may be on the meta device; nothing is read.

    :raises NotStorableError: if a tensor is expanded, overlaps another one, or has holes.
    """
    names = _all_names(model)
    layouts = [block.layout for block in inventory.blocks]
    layouts.append(plan_layout(owned.spec for owned in inventory.fixed))
    paths = [block.block.path for block in inventory.blocks]
    groups = [block.tensors for block in inventory.blocks]
    images = [
        _image(path, "block", layout, tensors, names)
        for path, layout, tensors in zip(paths, layouts, groups, strict=False)
    ]
    images.append(_image(FIXED, "fixed", layouts[-1], inventory.fixed, names))
    return Ownership(tuple(images), tuple(layouts))


def check_boundary(inventory: Inventory, neighbours: Iterable[nn.Module]) -> None:
    """Return if no tensor shares memory with a module outside.

    :raises NotStorableError: if one does: its memory is not this model's alone.
    """
    outside = {
        tensor.untyped_storage().data_ptr(): name
        for module in neighbours
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if not tensor.is_meta and tensor.numel()
    }
    tensors = (*inventory.fixed, *(owned for block in inventory.blocks for owned in block.tensors))
    for owned in tensors:
        if not owned.tensor.is_meta and owned.tensor.untyped_storage().data_ptr() in outside:
            other = outside[owned.tensor.untyped_storage().data_ptr()]
            raise NotStorableError(
                StoreCode.UNSUPPORTED_ALIAS, owned.name, f"it shares memory with {other} of another module"
            )


def _all_names(model: nn.Module) -> dict[int, list[str]]:
    """Every name of each tensor, by its ``id``."""
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for holder in (module._parameters, module._buffers):
            for key, tensor in holder.items():
                if tensor is not None:
                    names.setdefault(id(tensor), []).append(f"{path}.{key}" if path else key)
    return names


def _image(
    name: str,
    role: Literal["block", "fixed"],
    layout: ImageLayout,
    tensors: Sequence[OwnedTensor],
    names: Mapping[int, list[str]],
) -> StoredImage:
    by_name = {owned.name: owned for owned in tensors}
    stored = tuple(_stored(region, layout, by_name, names) for region in layout.regions)
    return StoredImage(name=name, role=role, nbytes=layout.nbytes, tensors=stored)


def _stored(
    region: Region, layout: ImageLayout, by_name: Mapping[str, OwnedTensor], names: Mapping[int, list[str]]
) -> StoredTensor:
    first = region.names[0]
    views = [view for view in layout.views if view.name in region.names]
    if any(attrs.evolve(view, name=first) != attrs.evolve(views[0], name=first) for view in views):
        problem = f"it shares memory with {', '.join(region.names[1:])} without being the same tensor"
        raise NotStorableError(StoreCode.UNSUPPORTED_TENSOR, first, problem)
    view = views[0]
    _check_dense(first, view.shape, view.stride, region.nbytes, by_name[first].tensor)
    aliases = [name for member in region.names for name in names[id(by_name[member].tensor)]]
    return StoredTensor(
        name=first,
        kind="parameter" if isinstance(by_name[first].tensor, nn.Parameter) else "buffer",
        dtype=view.dtype,
        shape=view.shape,
        stride=view.stride,
        offset_bytes=view.offset_bytes,
        aliases=tuple(name for name in dict.fromkeys(aliases) if name != first),
    )


def _check_dense(name: str, shape: Sequence[int], stride: Sequence[int], nbytes: int, tensor: torch.Tensor) -> None:
    if is_overlapping(shape, stride):
        raise NotStorableError(
            StoreCode.UNSUPPORTED_TENSOR, name, f"its strides {list(stride)} lay elements over each other"
        )
    if nbytes != tensor.numel() * tensor.element_size():
        raise NotStorableError(
            StoreCode.UNSUPPORTED_TENSOR, name, f"its strides {list(stride)} leave holes between elements"
        )
