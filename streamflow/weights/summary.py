"""What the names of a checkpoint say about its model: stacks of blocks, and what lies outside them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import attrs

from streamflow.stages.layout import align_up
from streamflow.weights.safetensors_header import TensorEntry

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


@attrs.frozen
class StackSummary:
    """A stack, as far as names tell. ``path`` is its place in the model, empty if the model is the list itself.

    Per block, in order: bytes of its tensors, bytes of its image (tensors at aligned offsets), number of its tensors.
    """

    path: str
    block_bytes: tuple[int, ...]
    block_image_bytes: tuple[int, ...]
    block_tensors: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        return len(self.block_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the stack."""
        return sum(self.block_bytes)


@attrs.frozen
class CheckpointSummary:
    """Stacks in the order of the files, which need not be that of execution; ``root_bytes``: all other tensors."""

    stacks: tuple[StackSummary, ...]
    root_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.root_bytes + sum(stack.nbytes for stack in self.stacks)


def summarize_checkpoint(entries: Mapping[str, TensorEntry]) -> CheckpointSummary:
    """The stacks that tensor names suggest: outermost ``path.<i>.`` whose indices run from 0 without a gap.

    Names alone cannot tell a stack from any other list of modules; lists with gaps (a Sequential with activations
    between its layers) are not taken for one.
    """
    lists = _complete_lists(entries)
    blocks: dict[str, dict[int, list[int]]] = {}
    root_bytes = 0
    for name, entry in entries.items():
        place = next((place for place in _places(name) if place[0] in lists), None)
        if place is None:
            root_bytes += entry.nbytes
        else:
            blocks.setdefault(place[0], {}).setdefault(place[1], []).append(entry.nbytes)
    return CheckpointSummary(tuple(_stack(path, found) for path, found in blocks.items()), root_bytes)


def _complete_lists(names: Iterable[str]) -> set[str]:
    indices: dict[str, set[int]] = {}
    for name in names:
        for path, index in _places(name):
            indices.setdefault(path, set()).add(index)
    return {path for path, found in indices.items() if max(found) == len(found) - 1}


def _places(name: str) -> list[tuple[str, int]]:
    """Every ``path.<i>.`` in ``name``, outermost first, as path and index."""
    parts = name.split(".")
    return [(".".join(parts[:i]), int(part)) for i, part in enumerate(parts[:-1]) if _INDEX.fullmatch(part)]


def _stack(path: str, blocks: Mapping[int, list[int]]) -> StackSummary:
    sizes = [blocks[index] for index in sorted(blocks)]
    return StackSummary(
        path=path,
        block_bytes=tuple(sum(block) for block in sizes),
        block_image_bytes=tuple(sum(align_up(nbytes) for nbytes in block) for block in sizes),
        block_tensors=tuple(len(block) for block in sizes),
    )
