"""The digit transformer: shapes, sizes, and where its bytes lie."""

from __future__ import annotations

import pytest
import torch

from streamflow.stages.errors import StreamflowError
from streamflow.tools.demo.checkpoint import build_empty_model
from streamflow.tools.demo.errors import DemoValueError
from streamflow.tools.demo.model import DigitBlock, DigitTransformer, DigitTransformerConfig


def make_inputs(config: DigitTransformerConfig, num_images: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(num_images, 1, config.image_size, config.image_size, generator=generator)
    t = torch.rand(num_images, generator=generator)
    return x, t, torch.arange(num_images) % (config.num_classes + 1)


@pytest.mark.parametrize(
    "config",
    [
        DigitTransformerConfig(),
        DigitTransformerConfig(patch_size=1, width=16, num_blocks=1, num_heads=1),
        DigitTransformerConfig(image_size=12, patch_size=4, width=24, num_blocks=3, num_heads=3, num_classes=2),
    ],
)
@pytest.mark.parametrize("num_images", [1, 5])
def test_the_velocity_has_the_shape_of_the_image(config: DigitTransformerConfig, num_images: int) -> None:
    x, t, y = make_inputs(config, num_images)
    velocity = DigitTransformer(config)(x, t, y)
    assert velocity.shape == x.shape
    assert velocity.dtype == torch.float32


def test_a_new_model_returns_zeros_and_its_blocks_return_their_input() -> None:
    config = DigitTransformerConfig()
    assert torch.count_nonzero(DigitTransformer(config)(*make_inputs(config, 3))) == 0
    tokens = torch.randn(3, config.num_tokens, config.width)
    assert torch.equal(DigitBlock(config)(tokens, torch.randn(3, config.width)), tokens)


def test_time_and_class_change_what_the_trained_model_returns(model: DigitTransformer) -> None:
    x, t, y = make_inputs(model.config, 4)
    velocity = model(x, t, y)
    assert (model(x, t, (y + 1) % 10) - velocity).abs().amax() > 0.1
    assert (model(x, 1 - t, y) - velocity).abs().amax() > 0.1


def test_images_of_a_batch_do_not_see_each_other(model: DigitTransformer) -> None:
    x, t, y = make_inputs(model.config, 4)
    alone = torch.cat([model(x[i : i + 1], t[i : i + 1], y[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(model(x, t, y), alone, rtol=1e-4, atol=1e-4)


def test_each_block_runs_once_in_order_and_all_of_them_matter(model: DigitTransformer) -> None:
    ran: list[int] = []
    hooks = [
        block.register_forward_pre_hook(lambda _module, _args, index=index: ran.append(index))
        for index, block in enumerate(model.blocks)
    ]
    model(*make_inputs(model.config, 1))
    for hook in hooks:
        hook.remove()
    assert ran == list(range(12))
    assert all(model.get_parameter(f"blocks.{index}.modulation.weight").abs().amax() > 0.01 for index in ran)


def test_most_bytes_lie_in_many_blocks_of_one_size_and_none_in_buffers(model: DigitTransformer) -> None:
    block_bytes = [sum(p.nbytes for p in block.parameters()) for block in model.blocks]
    assert len(block_bytes) >= 8
    assert len(set(block_bytes)) == 1
    assert sum(block_bytes) > 0.95 * sum(p.nbytes for p in model.parameters())
    assert list(model.buffers()) == []


def test_the_skeleton_takes_no_memory_and_leaves_the_random_state() -> None:
    before = torch.get_rng_state()
    skeleton = build_empty_model(DigitTransformerConfig())
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}
    assert not skeleton.training
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"width": -64}, "width"),
        ({"width": 63}, "width"),
        ({"num_heads": 5}, "width"),
        ({"num_heads": 3, "width": 9}, "width"),
        ({"patch_size": 3}, "patch_size"),
        ({"mlp_ratio": True}, "mlp_ratio"),
    ],
)
def test_impossible_sizes_are_refused_by_name(sizes: dict[str, int], name: str) -> None:
    with pytest.raises(DemoValueError, match=name) as caught:
        DigitTransformerConfig(**sizes)
    assert caught.value.name == name
    assert isinstance(caught.value, StreamflowError)
    assert isinstance(caught.value, ValueError)
