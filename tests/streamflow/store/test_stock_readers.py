"""Stock safetensors readers open every file of an entry and read the right values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from streamflow.stages.layout import TensorSpec, plan_layout
from streamflow.store.draft import Draft, StoredImage, StoredTensor
from streamflow.store.packing import PAD_PREFIX
from streamflow.store.stored_form import stored_form
from tests.streamflow.store.kit import opened

pytestmark = pytest.mark.anyio

TENSORS = {
    "bf16": torch.randn(7, 5).to(torch.bfloat16),
    "fp8": torch.randn(8, 8).to(torch.float8_e4m3fn),
    "transposed": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "complex": torch.randn(3, dtype=torch.complex64),
    "flags": torch.tensor([True, False, True]),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "int64": torch.arange(9),
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def image(name: str, tensors: dict[str, torch.Tensor]) -> tuple[StoredImage, bytearray]:
    specs = [
        TensorSpec(f"{name}.{key}", str(t.dtype).removeprefix("torch."), tuple(t.shape), t.stride())
        for key, t in tensors.items()
    ]
    layout = plan_layout(specs)
    data = bytearray(layout.nbytes)
    for view, tensor in zip(layout.views, tensors.values(), strict=True):
        flat = torch.as_strided(tensor, (tensor.numel(),), (1,), 0).contiguous().view(torch.uint8)
        data[view.offset_bytes : view.offset_bytes + flat.numel()] = bytes(flat.tolist())
    stored = tuple(StoredTensor(v.name, "parameter", v.dtype, v.shape, v.stride, v.offset_bytes) for v in layout.views)
    return StoredImage(name, "block", layout.nbytes, stored), data


async def test_every_tensor_is_read_with_equal_values(root: Path) -> None:
    images, data = zip(*(image(f"b{index}", TENSORS) for index in range(3)), strict=True)

    def read(index: int, target: memoryview, start: int) -> None:
        target[:] = memoryview(data[index])[start : start + target.nbytes]

    async with opened(root, max_file_bytes=150_000) as store:
        published = await store.publish(Draft(images, read, {}), source_id=None)
        lease = await store.lease(published.content_id)
        assert lease is not None
        with lease:
            stored = {tensor.name: tensor for entry in images for tensor in entry.tensors}
            found: set[str] = set()
            for file in lease.manifest.files:
                with safe_open(Path(lease.path, file.name), "pt") as opened_file:  # type: ignore[no-untyped-call]
                    for name in opened_file.keys():  # noqa: SIM118 - no mapping
                        if name.startswith(PAD_PREFIX):
                            assert not opened_file.get_tensor(name).any()
                            continue
                        found.add(name)
                        form = stored_form(stored[name])
                        tensor = opened_file.get_tensor(name).permute(form.permutation)
                        expected = TENSORS[name.partition(".")[2]]
                        assert tensor.dtype == expected.dtype
                        assert tensor.stride() == expected.stride() or tensor.numel() == 0
                        assert torch.equal(bits(tensor), bits(expected))
            assert found == stored.keys()
            assert len(lease.manifest.files) > 1
