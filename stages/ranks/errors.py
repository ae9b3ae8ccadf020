"""Errors between ranks."""

from __future__ import annotations

from streamflow.stages.errors import StreamflowError


class GatherError(StreamflowError, RuntimeError):
    """Ranks could not gather a block from each other; ``reason`` says how it was noticed.

    ``rank`` of ``size`` is where it was noticed, which need not be the rank that failed.
    """

    def __init__(self, rank: int, size: int, reason: str) -> None:
        self.rank, self.size, self.reason = rank, size, reason
        super().__init__(
            f"rank {rank} of {size} could not gather a block from the others: {reason}; a rank has ended, stands still "
            "or broke off; close the offload on every rank and open new ones"
        )
