"""Drawing digits: what decides them, and what is refused."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from streamflow.tools.demo.errors import DemoValueError
from streamflow.tools.demo.model import DigitTransformer
from streamflow.tools.demo.sampling import sample

LABELS = [3, 1, 4, 1, 5]


def test_the_same_seed_draws_the_same_digits_to_the_bit(model: DigitTransformer) -> None:
    first = sample(model, LABELS, seed=5, num_steps=6)
    torch.rand(3)
    assert torch.equal(sample(model, LABELS, seed=5, num_steps=6), first)
    assert first.shape == (5, 1, 8, 8)
    assert first.dtype == torch.float32
    assert first.abs().amax() <= 1


def test_another_seed_another_label_and_other_weights_draw_other_digits(model: DigitTransformer) -> None:
    first = sample(model, LABELS, seed=5, num_steps=6)
    assert (sample(model, LABELS, seed=6, num_steps=6) - first).abs().amax() > 0.5
    assert (sample(model, [*LABELS[:4], 6], seed=5, num_steps=6)[4] - first[4]).abs().amax() > 0.5
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.get_parameter("blocks.11.modulation.bias").add_(0.1)
    assert not torch.equal(sample(changed, LABELS, seed=5, num_steps=6), first)


def test_the_callers_random_state_and_grad_mode_stay(model: DigitTransformer) -> None:
    before = torch.get_rng_state()
    images = sample(model, LABELS, seed=5, num_steps=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()
    assert not images.requires_grad


def test_progress_is_told_after_each_step(model: DigitTransformer) -> None:
    seen: list[tuple[int, int]] = []
    sample(model, [0], seed=0, num_steps=4, on_step=lambda step, total: seen.append((step, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_guidance_of_one_is_the_conditional_model_and_of_nought_ignores_the_label(model: DigitTransformer) -> None:
    plain = sample(model, LABELS, seed=5, num_steps=6, guidance=1)
    nearly = sample(model, LABELS, seed=5, num_steps=6, guidance=1 + 1e-6)
    torch.testing.assert_close(plain, nearly, rtol=0, atol=1e-3)
    unguided = sample(model, LABELS, seed=5, num_steps=6, guidance=0)
    torch.testing.assert_close(unguided, sample(model, [9] * 5, seed=5, num_steps=6, guidance=0), rtol=0, atol=1e-4)
    assert (unguided - plain).abs().amax() > 0.5


def test_a_model_call_has_both_halves_only_when_guidance_needs_them(model: DigitTransformer) -> None:
    sizes: list[int] = []
    hook = model.register_forward_pre_hook(lambda _module, args: sizes.append(len(args[0])))
    sample(model, LABELS, seed=0, num_steps=2, guidance=2.5)
    sample(model, LABELS, seed=0, num_steps=2, guidance=1)
    hook.remove()
    assert sizes == [10, 10, 5, 5]


def test_the_models_dtype_is_followed(model: DigitTransformer) -> None:
    double = copy.deepcopy(model).double()
    images = sample(double, LABELS, seed=5, num_steps=6)
    assert images.dtype == torch.float32
    torch.testing.assert_close(images, sample(model, LABELS, seed=5, num_steps=6), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": -1}, "num_steps"),
        ({"guidance": -0.5}, "guidance"),
        ({"guidance": math.nan}, "guidance"),
        ({"guidance": math.inf}, "guidance"),
        ({"labels": []}, "labels"),
        ({"labels": [3, 10]}, "label"),
        ({"labels": [-1]}, "label"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(
    model: DigitTransformer, options: dict[str, object], name: str
) -> None:
    arguments = {"labels": LABELS, "seed": 0, **options}
    with pytest.raises(DemoValueError, match=name) as caught:
        sample(model, **arguments)  # type: ignore[arg-type]
    assert caught.value.name == name
