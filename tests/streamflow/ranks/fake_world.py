"""A world of several ranks in one process: torch's own fake backend, whose collectives do nothing. Groups are real."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """This process is rank ``rank`` of ``size``; left behind is nothing."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
