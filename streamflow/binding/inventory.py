"""Which tensor of a model goes where: with its block, or to the device for good."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import attrs
import torch
from torch import nn

from streamflow.discovery import Block
from streamflow.errors import UnsupportedModelError
from streamflow.stages.dtypes import DTYPE_BYTES
from streamflow.stages.layout import ImageLayout, Region, TensorSpec, plan_layout


@attrs.frozen(eq=False)
class OwnedTensor:
    """A parameter or buffer, by its first name. ``streamable``: a parameter or a persistent buffer.

    ``spec`` is how it lay when the inventory was taken.
    """

    name: str
    tensor: torch.Tensor
    streamable: bool
    spec: TensorSpec


@attrs.frozen(eq=False)
class BlockTensors:
    """A block with the tensors that stream with it, each once, and the layout of its image."""

    block: Block
    tensors: tuple[OwnedTensor, ...]
    layout: ImageLayout


@attrs.frozen(eq=False)
class Inventory:
    """All tensors of a model: those of its blocks, and the rest (``fixed``), which stays on the device.

    A tensor that two blocks share, or a block and the rest, is fixed: it cannot be in two slots at once.
    """

    blocks: tuple[BlockTensors, ...]
    fixed: tuple[OwnedTensor, ...]

    def with_tensors(self, replaced: Mapping[int, torch.Tensor]) -> Inventory:
        """The same inventory over other tensors; ``replaced`` has them by the ``id`` of those they stand for."""

        def renew(tensors: Sequence[OwnedTensor]) -> tuple[OwnedTensor, ...]:
            return tuple(attrs.evolve(owned, tensor=replaced.get(id(owned.tensor), owned.tensor)) for owned in tensors)

        blocks = tuple(attrs.evolve(block, tensors=renew(block.tensors)) for block in self.blocks)
        return Inventory(blocks, renew(self.fixed))

    def without_fixed(self, tensors: Collection[int]) -> Inventory:
        """The same inventory but for fixed tensors of these ``id``, which somebody else moves."""
        return Inventory(self.blocks, tuple(owned for owned in self.fixed if id(owned.tensor) not in tensors))

    @property
    def streamable_bytes(self) -> int:
        """Bytes of all block images."""
        return sum(block.layout.nbytes for block in self.blocks)


def take_inventory(model: nn.Module, blocks: Sequence[Block], shared: Collection[int] = ()) -> Inventory:
    """The inventory of ``model``; nothing is changed. ``shared``: the ``id`` of tensors that others have, too; they are
    fixed.

    :raises UnsupportedModelError: if a tensor cannot be re-pointed exactly: a tensor subclass, a parameter that carries
        other tensors, an uninitialised one, a dtype without a place in an image.
    """
    homes = _homes(model, blocks)
    per_block: dict[int, list[OwnedTensor]] = {index: [] for index in range(len(blocks))}
    fixed: list[OwnedTensor] = []
    for tensor_id, owned in _named_tensors(model).items():
        where = homes[tensor_id]
        home = next(iter(where)) if len(where) == 1 else None
        if home is None or not owned.streamable or tensor_id in shared:
            fixed.append(owned)
        else:
            per_block[home].append(owned)
    return Inventory(tuple(_block_tensors(block, per_block[index]) for index, block in enumerate(blocks)), tuple(fixed))


def take_again(model: nn.Module, before: Inventory) -> Inventory:
    """The inventory of ``model``, whose tensors lie elsewhere than ``before``, with the same of them in each block."""
    fixed = {id(owned.tensor) for owned in before.fixed}
    return take_inventory(model, [tensors.block for tensors in before.blocks], fixed)


def _homes(model: nn.Module, blocks: Sequence[Block]) -> dict[int, set[int | None]]:
    """For each tensor the blocks that reach it; None among them: something outside every block does."""
    module_homes: dict[int, set[int]] = {}
    for index, block in enumerate(blocks):
        for module in block.module.modules():
            module_homes.setdefault(id(module), set()).add(index)
    homes: dict[int, set[int | None]] = {}
    for module in model.modules():
        for _, tensor, _ in _direct_tensors(module):
            homes.setdefault(id(tensor), set()).update(module_homes.get(id(module), {None}))
    return homes


def _direct_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Key, tensor, and whether it is streamable, for the tensors that the module holds itself."""
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield key, parameter, True
    for key, buffer in module._buffers.items():
        if buffer is not None:
            yield key, buffer, key not in module._non_persistent_buffers_set


def _named_tensors(model: nn.Module) -> dict[int, OwnedTensor]:
    """Each tensor once, by identity, under its first name."""
    found: dict[int, OwnedTensor] = {}
    for path, module in model.named_modules():
        for key, tensor, streamable in _direct_tensors(module):
            name = f"{path}.{key}" if path else key
            if id(tensor) not in found:
                _check_supported(name, tensor)
            found.setdefault(id(tensor), OwnedTensor(name, tensor, streamable, spec_of(name, tensor)))
    return found


def _check_supported(name: str, tensor: torch.Tensor) -> None:
    kind = type(tensor.data)
    load_first = "quantize or wrap it after closing, or exclude its block from the plan"
    if nn.parameter.is_lazy(tensor):
        raise UnsupportedModelError(name, "it is not initialised yet", "run the model once before opening")
    if tensor.is_inference():
        raise UnsupportedModelError(name, "it was made in inference mode", "build the model outside it")
    if kind is not torch.Tensor:
        raise UnsupportedModelError(name, f"it is a tensor subclass ({kind.__name__})", load_first)
    carried = [key for key, value in vars(tensor).items() if isinstance(value, torch.Tensor)]
    if carried:
        raise UnsupportedModelError(name, f"it carries other tensors ({', '.join(carried)})", load_first)
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        raise UnsupportedModelError(name, "it is sparse, conjugated or negated", "make it an ordinary tensor")
    if dtype_name(tensor) not in DTYPE_BYTES:
        raise UnsupportedModelError(name, f"its dtype {tensor.dtype} has no place in an image", load_first)


def dtype_name(tensor: torch.Tensor) -> str:
    """The tensor's dtype as images name it."""
    return str(tensor.dtype).removeprefix("torch.")


def _block_tensors(block: Block, tensors: Sequence[OwnedTensor]) -> BlockTensors:
    return BlockTensors(block, tuple(tensors), plan_layout(owned.spec for owned in tensors))


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """How an image's layout sees the tensor."""
    return TensorSpec(
        name=name,
        dtype=dtype_name(tensor),
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        # the storage's own identity: on the meta device it has no address
        storage=tensor.untyped_storage()._cdata if type(tensor.data) is torch.Tensor else None,
        storage_offset_bytes=int(tensor.storage_offset()) * tensor.element_size(),
    )


def region_bytes(region: Region, tensor: torch.Tensor) -> torch.Tensor:
    """The region's bytes where they are now, as a flat uint8 tensor; ``tensor`` is any tensor of the region."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = region.storage_start_bytes
    return flat.set_(tensor.untyped_storage(), start, (region.nbytes,), (1,))
