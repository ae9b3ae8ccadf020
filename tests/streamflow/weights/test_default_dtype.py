"""What is computed in torch's default dtype is found, with all that comes from it, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from streamflow.weights.default_dtype import DefaultDtypeWatch


class Keeper(nn.Module):
    """Keeps what it is given as a buffer that is not saved."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", value, persistent=False)


def found(compute: Callable[[], torch.Tensor]) -> list[str]:
    watch = DefaultDtypeWatch()
    with watch:
        model = Keeper(compute())
    return watch.found_in(model)


def written_in_place() -> torch.Tensor:
    table = torch.zeros(4, dtype=torch.float64)
    table[1:] = torch.arange(3) / 3
    return table


def written_through_out() -> torch.Tensor:
    table = torch.empty(3, dtype=torch.float32)
    torch.add(torch.arange(3, dtype=torch.float32), torch.tensor(0.1), out=table)
    return table


BY_DEFAULT: dict[str, Callable[[], torch.Tensor]] = {
    "zeros": lambda: torch.zeros(3),
    "a list of numbers": lambda: torch.tensor([1.0, 2.0]),
    "a range of floats": lambda: torch.arange(0, 1, 0.1),
    "a linear space": lambda: torch.linspace(0, 1, 5),
    "random numbers": lambda: torch.randn(3),
    "integers divided": lambda: torch.arange(8) / 3,
    "an integer power": lambda: 2.0 ** torch.arange(3),
    "a function of integers": lambda: torch.arange(3).sin(),
    "integers and a number": lambda: torch.arange(3) * 0.5,
    "widened later": lambda: (torch.arange(8) / 3).double(),
    "converted later": lambda: (torch.arange(8) / 3).to(torch.float64),
    "two steps later": lambda: torch.cat([torch.ones(2, dtype=torch.float64), torch.rand(2).double()])[1:],
    "a view": lambda: torch.zeros(2, 3).T[0],
    "written in place": written_in_place,
    "written through out": written_through_out,
    "a complex number": lambda: torch.polar(torch.ones(3), torch.rand(3)),
    "uninitialised": lambda: torch.empty(3),
    "a copy": lambda: torch.zeros(3).clone().detach(),
}
BY_CHOICE: dict[str, Callable[[], torch.Tensor]] = {
    "integers": lambda: torch.arange(3),
    "a dtype": lambda: torch.zeros(3, dtype=torch.float32),
    "a dtype by position": lambda: torch.arange(3).to(torch.float32),
    "a method named like one": lambda: torch.arange(3).float(),
    "another's dtype": lambda: torch.arange(3).type_as(torch.zeros(1, dtype=torch.float32)),
    "like another": lambda: torch.ones_like(torch.zeros(3, dtype=torch.float32)),
    "a step later": lambda: 1.0 / (10000 ** (torch.arange(0, 8, 2, dtype=torch.float32) / 8)),
    "an outer product": lambda: torch.outer(torch.arange(3), torch.arange(3, dtype=torch.float32)),
    "an array": lambda: torch.from_numpy(np.arange(3, dtype=np.float32)),
    "an array copied": lambda: torch.tensor(np.arange(3, dtype=np.float32)),
    "another dtype than the default": lambda: torch.zeros(3, dtype=torch.float64) / 3,
}
#: The same under every default, which nothing proves.
IN_DOUBT: dict[str, Callable[[], torch.Tensor]] = {
    "a comparison": lambda: torch.ones(3) > torch.zeros(3),
    "a count": lambda: torch.ones(3).sum().to(torch.int64),
}


@pytest.mark.parametrize("what", BY_DEFAULT)
def test_what_is_made_in_the_default_dtype_is_found(what: str) -> None:
    assert found(BY_DEFAULT[what]) == ["kept"]


@pytest.mark.parametrize("what", BY_CHOICE)
def test_what_asks_for_its_dtype_is_not(what: str) -> None:
    assert found(BY_CHOICE[what]) == []


@pytest.mark.parametrize("what", IN_DOUBT)
def test_what_comes_from_it_is_found_even_if_its_own_dtype_is_certain(what: str) -> None:
    assert found(IN_DOUBT[what]) == ["kept"]


@pytest.mark.parametrize("what", BY_CHOICE)
def test_what_is_not_found_is_the_same_under_another_default(what: str) -> None:
    compute = BY_CHOICE[what]
    before = compute()
    torch.set_default_dtype(torch.bfloat16)
    try:
        under_another = compute()
    finally:
        torch.set_default_dtype(torch.float32)
    assert under_another.dtype == before.dtype
    assert torch.equal(under_another, before)


def test_only_what_a_model_keeps_outside_of_its_checkpoint_counts() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.scale = nn.Parameter(torch.randn(2) / 3)
            self.register_buffer("saved", torch.ones(2))
            self.register_buffer("absent", None, persistent=False)
            self.inner = Keeper(torch.ones(2, dtype=torch.float32))
            self.rate = 0.5

    watch = DefaultDtypeWatch()
    with watch:
        model = Model()
    assert watch.found_in(model) == []


def test_plain_attributes_count_wherever_they_hold_tensors() -> None:
    class Model(nn.Module):
        plain: Any

        def __init__(self) -> None:
            super().__init__()
            self.plain = {"tables": [torch.ones(2), "text"]}

    watch = DefaultDtypeWatch()
    with watch:
        model = nn.Sequential(Model(), nn.Identity())
        object.__setattr__(model, "own", torch.ones(2))
    assert watch.found_in(model) == ["own", "0.plain"]
