"""Errors of ranks that hold one model together."""

from __future__ import annotations

from streamflow.stages.errors import StreamflowError


class SharedImagesError(StreamflowError, RuntimeError):
    """The ranks cannot keep one host copy of ``component`` among them, because of what ``rank`` met."""

    def __init__(self, component: str, rank: int, reason: str) -> None:
        self.component, self.rank, self.reason = component, rank, reason
        super().__init__(
            f"the ranks share no host copy of {component}: rank {rank}: {reason}; let them share an entry of the host "
            "weight store instead (store_mode='preferred')"
        )


class WeightsDifferError(StreamflowError, ValueError):
    """Rank ``rank`` has other weights than rank 0 of its group.

    ``block`` is the block of ``component`` where it was seen, None where they have other blocks; ``tensor`` is the name
    of the tensor, None where the block has others.
    """

    def __init__(self, component: str, rank: int, block: str | None, tensor: str | None) -> None:
        self.component, self.rank, self.block, self.tensor = component, rank, block, tensor
        what = f"other blocks of {component}" if block is None else f"other tensors in {block} of {component}"
        if tensor is not None:
            what = f"other values in {tensor} ({block} of {component})"
        super().__init__(
            f"rank {rank} has {what} than rank 0, but the ranks of a group stream the same weights; "
            "load the same checkpoint with the same options on each of them"
        )
