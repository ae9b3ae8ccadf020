"""What an offload runs on: a device, and perhaps other ranks with theirs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import attrs
import torch
from anyio.lowlevel import checkpoint
from torch.distributed.device_mesh import DeviceMesh

from streamflow.config import OffloadConfig
from streamflow.errors import ConfigurationError
from streamflow.ranks.gathering import choose_gathering
from streamflow.ranks.opening import Ranks, open_ranks
from streamflow.ranks.topology import RankGroups, parallelism_of, rank_groups, resolved_topology
from streamflow.stages.devices.base import Device
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.devices.cuda import CudaDevice


@attrs.frozen(eq=False)
class Hardware:
    """``device`` is a backend that is not open. ``ranks`` gather with this one; None: it copies whole blocks, and
    ``why_alone`` says why, if other ranks were named.
    """

    device: Device
    ranks: Ranks | None = None
    why_alone: str | None = None

    async def open_together(self, last_step: Callable[[], Awaitable[None]] = checkpoint) -> None:
        """Do what is left of opening an offload here; returns once the other ranks have, too.

        :raises RankError: if a rank is gone, or failed.
        """
        if self.ranks is None:
            await last_step()
        else:
            await self.ranks.open_together(last_step)


@asynccontextmanager
async def open_hardware(
    device: Device | None, ranks: RankGroups | DeviceMesh | None, config: OffloadConfig
) -> AsyncIterator[tuple[Hardware, OffloadConfig]]:
    """The hardware, and ``config`` with what the groups of ranks say of the topology. See `open_offload`.

    :raises ConfigurationError: if ``device`` is the name of one, or the ranks cannot do what is asked for.
    :raises RankGroupError, MeshDimensionError, TopologyMismatchError: if ``ranks`` is not usable.

    What `open_ranks` raises, too.
    """
    backend = backend_of(device, config)
    groups = rank_groups(ranks)
    if groups is not None:
        config = attrs.evolve(config, topology=resolved_topology(groups, config.topology))
    choice = choose_gathering(groups, parallelism_of(groups, config.topology), config.ranks.gather)
    if choice.group is None:
        yield Hardware(backend, why_alone=None if groups is None else choice.reason), config
        return
    async with open_ranks(choice.group, config, backend) as opened:
        yield Hardware(backend, opened), config


def backend_of(device: Device | None, config: OffloadConfig) -> Device:
    """``device``, or the backend that the configuration names.

    :raises ConfigurationError: if ``device`` is the name of one.
    """
    if isinstance(device, (str, torch.device)):
        raise ConfigurationError(
            [f"device= takes a backend; to name a device, use the option: {{'device': '{device}'}}"]
        )
    return device if device is not None else make_device(config)


def make_device(config: OffloadConfig) -> Device:
    """The backend that the configuration names."""
    device = config.torch_device()
    return CudaDevice(device) if device.type == "cuda" else CpuDevice()
