"""What other libraries make of the same model on the same device, for ``streamflow bench step``.

The model is the benchmark's own, a plain module: diffusers' group offload and accelerate's ``cpu_offload`` take any. By
blocks, group offload makes a group of every item of the model's block lists, as it does for diffusers' own FLUX
transformer, which has the same lists. Each peer gets its fastest documented options: a copy stream, ``record_stream``,
host memory that is page-locked beforehand. accelerate has no such options. Every peer runs in a process of its own,
with the same weights and inputs, alone on the device, and under a timeout.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
import torch
from torch import nn

from streamflow.tools.bench.children import ChildAnswer, ask_child
from streamflow.tools.bench.flux_shaped import FluxShape
from streamflow.tools.bench.time_limit import TimeLimit

WORKER = "streamflow.tools.bench.peer_worker"
#: Making the model and page-locking it takes most of this.
PEER_TIMEOUT_S = 240.0


@attrs.frozen
class Peer:
    """A way to offload a module: ``apply`` prepares it in place, for a device; ``library`` has to be installed."""

    name: str
    library: str
    apply: Callable[[nn.Module, torch.device], None]


@attrs.frozen
class PeerReading:
    """One peer at one picture size; seconds are medians of steps. ``problem``: why there is none; None if there is."""

    peer: str
    version: str | None
    image_px: int
    step_s: float | None
    ratio_to_link_limit: float | None
    ratio_to_resident: float | None
    equal: bool | None
    device_peak_bytes: int | None
    problem: str | None


def _group_offload(model: nn.Module, device: torch.device, kind: str) -> None:
    from diffusers.hooks import apply_group_offloading

    streams = {"use_stream": True, "record_stream": True} if device.type == "cuda" else {}
    apply_group_offloading(
        model,
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type=kind,
        num_blocks_per_group=1 if kind == "block_level" else None,
        **streams,
    )


def _by_blocks(model: nn.Module, device: torch.device) -> None:
    _group_offload(model, device, "block_level")


def _by_leaves(model: nn.Module, device: torch.device) -> None:
    _group_offload(model, device, "leaf_level")


def _cpu_offload(model: nn.Module, device: torch.device) -> None:
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=device, offload_buffers=True)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("diffusers, by blocks", "diffusers", _by_blocks),
        Peer("diffusers, by leaves", "diffusers", _by_leaves),
        Peer("accelerate, cpu_offload", "accelerate", _cpu_offload),
    )
}


@attrs.frozen
class PeerQuestion:
    """What a peer is to measure."""

    peer: str
    shape: dict[str, Any]
    dtype: str
    image_px: list[int]
    num_text: int
    num_steps: int
    device: str


@attrs.frozen
class Standard:
    """What peers are compared with, at one picture size."""

    image_px: int
    link_limit_s: float
    resident_s: float
    digest: str


async def measure_peers(
    standards: list[Standard],
    shape: FluxShape,
    dtype: torch.dtype,
    num_text: int,
    num_steps: int,
    device: torch.device,
    limit: TimeLimit,
) -> AsyncIterator[PeerReading]:
    """Every peer at every size, one after the other; one that is not done when the limit ends is killed."""
    for peer in PEERS.values():
        if importlib.util.find_spec(peer.library) is None:
            for standard in standards:
                yield _without(peer, standard, f"{peer.library} is not installed")
        elif standards and limit.is_before(peer.name):
            question = PeerQuestion(
                peer.name,
                attrs.asdict(shape),
                str(dtype).removeprefix("torch."),
                [standard.image_px for standard in standards],
                num_text,
                num_steps,
                str(device),
            )
            found = await ask_child(WORKER, attrs.asdict(question), min(PEER_TIMEOUT_S, limit.left_s))
            for standard in standards:
                yield _told(peer, standard, found)


def _version(peer: Peer) -> str | None:
    try:
        return importlib.metadata.version(peer.library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _told(peer: Peer, standard: Standard, found: ChildAnswer) -> PeerReading:
    sizes = {} if found.values is None else found.values["sizes"]
    told = sizes.get(str(standard.image_px))
    return (
        _without(peer, standard, found.problem or "it has no reading")
        if told is None
        else _reading(peer, standard, told)
    )


def _without(peer: Peer, standard: Standard, problem: str) -> PeerReading:
    return PeerReading(peer.name, _version(peer), standard.image_px, None, None, None, None, None, problem)


def _reading(peer: Peer, standard: Standard, told: dict[str, Any]) -> PeerReading:
    return PeerReading(
        peer=peer.name,
        version=_version(peer),
        image_px=standard.image_px,
        step_s=told["step_s"],
        ratio_to_link_limit=told["step_s"] / standard.link_limit_s,
        ratio_to_resident=told["step_s"] / standard.resident_s,
        equal=told["digest"] == standard.digest,
        device_peak_bytes=told["device_peak_bytes"],
        problem=None,
    )
