"""How equality is shown: a resident model with aligned tensors, SHA-256 over outputs, and what must be left over."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils import _pytree as pytree

import streamflow
from streamflow import Offload, OffloadStatistics
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.engine import Engine
from tests.streamflow.models import Call, Case, bits_of

Result = TypeVar("Result")
Options = Mapping[str, Any]

#: Where a slot puts the first byte of a tensor; the resident model must not differ in that.
ALIGNMENT = 256
NUM_REQUESTS = 2


def aligned(nbytes: int) -> int:
    """``nbytes``, rounded up to what they take in a slot."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Every parameter and buffer of the model, each once."""
    found = [*model.parameters(), *model.buffers()]
    return list({id(tensor): tensor for tensor in found}.values())


@attrs.define
class Span:
    """A run of bytes of one storage, and the tensors in it."""

    start: int
    end: int
    tensors: list[torch.Tensor]


def span_of(tensor: torch.Tensor) -> Span:
    """The bytes from the tensor's first element to its last, holes included."""
    if tensor.numel() == 0:
        return Span(tensor.data_ptr(), tensor.data_ptr(), [tensor])
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return Span(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size(), [tensor])


def spans_of(tensors: Iterable[torch.Tensor]) -> list[Span]:
    """The runs of memory that the tensors lie in; tensors that overlap are in one."""
    spans: list[Span] = []
    for span in sorted(map(span_of, tensors), key=lambda span: (span.start, span.end)):
        if spans and span.start < spans[-1].end and span.end > span.start:
            spans[-1].end = max(spans[-1].end, span.end)
            spans[-1].tensors += span.tensors
        else:
            spans.append(span)
    return spans


def aligned_reference(model: nn.Module) -> nn.Module:
    """A copy of the model, to stay resident, whose tensors lie at aligned addresses as they do in a slot.

    Kernels choose other code, and other last bits, by the alignment of their operands. Strides and aliases are kept.
    """
    reference = copy.deepcopy(model)  # makes dense copies of tensors with holes: all are pointed elsewhere below
    originals = tensors_of(model)
    copies = dict(zip(map(id, originals), tensors_of(reference), strict=True))
    for span in spans_of(originals):
        size = span.end - span.start
        memory = torch.zeros(size + ALIGNMENT, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % ALIGNMENT :][:size]
        for tensor in (tensor for tensor in span.tensors if tensor.numel()):
            raw = memory[tensor.data_ptr() - span.start :][: span_of(tensor).end - tensor.data_ptr()]
            raw.copy_(memory_of(tensor))
            copies[id(tensor)].data = raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    return reference


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's span as flat uint8, without a copy."""
    span = span_of(tensor)
    start = tensor.storage_offset() * tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8)
    return flat.set_(tensor.untyped_storage(), start, (span.end - span.start,), (1,))


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The tensor's elements, one after the other."""
    bits = bits_of(tensor)
    return ctypes.string_at(bits.data_ptr(), bits.numel()) if bits.numel() else b""


def sha256_of(outputs: Any) -> str:
    """A digest of every tensor (dtype, shape, bytes) and other leaf of ``outputs``, and of how they are nested."""
    leaves, structure = pytree.tree_flatten(outputs)
    digest = hashlib.sha256(str(structure).encode())
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            digest.update(bytes_of(leaf))
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def in_worker(work: Callable[[], Result]) -> Result:
    """What ``work`` returns, run in a thread of its own, as a streamed forward is."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@torch.no_grad()
def run_calls(model: Callable[..., Any], calls: Sequence[Call]) -> list[Any]:
    """The outputs of all calls, one walk each."""
    return [model(*call) for call in calls]


def resident_digests(model: nn.Module, calls: Sequence[Call]) -> list[str]:
    """What each call of the model gives while the model is resident and aligned."""
    reference = aligned_reference(model)
    return [sha256_of(output) for output in in_worker(lambda: run_calls(reference, calls))]


@attrs.frozen(eq=False)
class TensorState:
    """One tensor as it is: identity, address, kind, bytes."""

    tensor: torch.Tensor
    address: int
    kind: tuple[Any, ...]
    digest: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorState:
        kind = (tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.requires_grad)
        return cls(tensor, tensor.data_ptr(), kind, "" if tensor.is_meta else sha256_of(tensor))


@attrs.frozen(eq=False)
class ModelState:
    """A model to the last attribute: every module's ``__dict__``, every tensor's identity, address, kind and bytes."""

    modules: dict[str, tuple[nn.Module, dict[str, Any]]]
    tensors: dict[str, TensorState]

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        modules = {
            path: (module, {key: _shallow(value) for key, value in vars(module).items()})
            for path, module in model.named_modules(remove_duplicate=False)
        }
        named = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        return cls(modules, {name: TensorState.of(tensor) for name, tensor in named})

    def assert_unchanged(self, model: nn.Module, *, in_place: bool = True) -> None:
        """Fail, naming the first difference, unless the model is now as it was then, ``in_place`` or elsewhere."""
        now = ModelState.of(model)
        assert list(now.modules) == list(self.modules)
        for path, (module, attributes) in self.modules.items():
            other, found = now.modules[path]
            assert other is module, f"{path} is another module"
            assert list(found) == list(attributes), f"{path} has other attributes"
            for key, value in attributes.items():
                assert found[key] is value or found[key] == value, f"{path}.{key} changed"
        assert list(now.tensors) == list(self.tensors)
        for name, state in self.tensors.items():
            assert now.tensors[name].tensor is state.tensor, f"{name} is another tensor"
            assert now.tensors[name].kind == state.kind, f"{name} is of another kind"
            assert not in_place or now.tensors[name].address == state.address, f"{name} lies elsewhere"
            assert now.tensors[name].digest == state.digest, f"{name} has other bytes"


def _shallow(value: Any) -> Any:
    """A copy of the containers of a module's ``__dict__``, compared by the identity of what they hold."""
    if isinstance(value, dict):
        return {key: id(item) for key, item in value.items()}
    if isinstance(value, (set, list)):
        return type(value)(value)
    return value


def streamflow_threads() -> list[str]:
    """The names of the threads that streamflow runs now."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("streamflow"))


def declared_bytes(statistics: OffloadStatistics) -> int:
    """What an offload may have on the device at most: its window, residents, transfer scratch and fixed tensors."""
    engine = statistics.engine
    return engine.window_bytes + engine.resident_bytes + engine.scratch_bytes + aligned(statistics.fixed_bytes)


def largest_block_bytes(blocks: Iterable[nn.Module]) -> int:
    """Bytes that the largest of the blocks takes in a slot, if it shares no tensor; counted from its tensors."""
    return max(sum(aligned(s.end - s.start) for s in spans_of(tensors_of(block))) for block in blocks)


def check_statistics(statistics: OffloadStatistics, *, streams: bool) -> None:
    """What every open offload that ran must show."""
    engine = statistics.engine
    assert (engine.streamed_bytes > 0) == streams
    assert engine.device_peak_bytes <= declared_bytes(statistics)
    assert engine.device_in_use_bytes <= engine.device_peak_bytes
    assert engine.num_late_messages == 0
    assert engine.num_dropped_events == 0
    assert (statistics.state, statistics.num_running, statistics.num_waiting) == ("ready", 0, 0)


async def settled(offload: Offload) -> None:
    """Return once the engine has heard of all that its passes did, and has nothing to do until the next one.

    For the offload's own loop.
    """
    with offload.observe() as events:  # whatever changes there is told afterwards
        while not _is_settled(offload._engine):
            await events.receive()


def _is_settled(engine: Engine) -> bool:
    planner = engine._planner
    is_busy = planner._walking or planner._waiting or engine._doorbell._messages
    return not is_busy and all(slot.block is None or slot.ready for slot in planner._slots)


async def compare(offload: Offload, model: nn.Module, calls: Sequence[Call], expected: Sequence[str]) -> None:
    """Two requests of one walk per call give the expected bytes; all of it has been counted when this returns."""
    for request in range(NUM_REQUESTS):
        outputs = await offload.run(run_calls, model, calls)
        assert [sha256_of(output) for output in outputs] == list(expected), f"request {request} differs"
    await settled(offload)


async def stream_and_compare(
    case: Case,
    options: Options | None = None,
    *,
    device: CpuDevice | None = None,
    streams: bool | None = None,
    in_place: bool = True,
) -> OffloadStatistics:
    """Stream the case's model, and fail unless it is exact, within its memory, and leaves everything as it was.

    ``streams`` None: as the case says. ``in_place``: weights are where they were, too. Returns the statistics from
    before closing.
    """
    model = case.build()
    expected = resident_digests(model, case.calls)
    before, threads = ModelState.of(model), streamflow_threads()
    backend = device if device is not None else CpuDevice()
    options = {"poison_freed_slots": True, "plan": case.plan, **(options or {})}
    async with streamflow.open_offload(model, options, device=backend) as offload:
        await compare(offload, model, case.calls, expected)
        statistics = offload.statistics()
    check_statistics(statistics, streams=case.streams if streams is None else streams)
    assert offload.state == "closed"
    assert backend.memory().in_use == 0
    assert streamflow_threads() == threads
    before.assert_unchanged(model, in_place=in_place)
    return statistics


def save_checkpoint(model: nn.Module, directory: Path, num_shards: int = 1) -> None:
    """Write the model's parameters and persistent buffers as loaders expect them: row by row, a tied one once."""
    by_id = {id(tensor): name for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    tensors = {
        name: model.state_dict()[name].detach().clone(memory_format=torch.contiguous_format) for name in by_id.values()
    }
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::num_shards])
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


async def stream_files_and_compare(
    case: Case, directory: Path, options: Options | None = None, *, device: CpuDevice | None = None
) -> OffloadStatistics:
    """Stream the case's model from the checkpoint in ``directory``; see `stream_and_compare`."""
    model = case.build()
    expected = resident_digests(model, case.calls)
    threads = streamflow_threads()
    backend = device if device is not None else CpuDevice()
    options = {"poison_freed_slots": True, "plan": case.plan, **(options or {})}
    async with streamflow.open_streamed(case.build, directory, options, device=backend) as (offload, streamed):
        await compare(offload, streamed, case.calls, expected)
        assert {name: sha256_of(tensor) for name, tensor in streamed.state_dict().items()} == {
            name: sha256_of(tensor) for name, tensor in model.state_dict().items()
        }
        statistics = offload.statistics()
    check_statistics(statistics, streams=case.streams)
    assert offload.state == "closed"
    assert backend.memory().in_use == 0
    assert streamflow_threads() == threads
    return statistics
