"""How a model is spread over ranks and converted, as far as it decides which weights a rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from streamflow.errors import ConfigurationError


@attrs.frozen(kw_only=True)
class WeightTopology:
    """What happens to weights between their files and the device. The data-parallel size and rank are no part of it:
    they change no byte.

    Attributes:
        tensor_parallel_size: ranks that hold different parts of each tensor.
        tensor_parallel_rank: which of them this one is, from 0; None: not known, which is right for one rank only.
        sequence_parallel_size: ranks that share a sequence. It is part of a stored model's identity, since layers may
            be built differently for it; the rank within it is not.
        ulysses_degree, ring_degree, allgather_degree: how the sequence is split, each at least 1.
        sequence_parallel_mode: the name of the implementation; None for its default.
        expert_parallel_size, cfg_parallel_size, pipeline_parallel_size: ranks that hold different experts, guidance
            branches or stages.
        hsdp: parameters are sharded by hybrid sharded data parallelism after loading.
        online_quantization: the method that converts weights while they load; None: none.

    :raises ConfigurationError: if a size is below 1, a rank is not below its size, or a kind is wrong.
    """

    tensor_parallel_size: int = 1
    tensor_parallel_rank: int | None = None
    sequence_parallel_size: int = 1
    ulysses_degree: int = 1
    ring_degree: int = 1
    allgather_degree: int = 1
    sequence_parallel_mode: str | None = None
    expert_parallel_size: int = 1
    cfg_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    hsdp: bool = False
    online_quantization: str | None = None

    def __attrs_post_init__(self) -> None:
        problems = list(_problems(attrs.asdict(self)))
        if problems:
            raise ConfigurationError(problems)


def _problems(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if name.endswith(("_size", "_degree")) and (type(value) is not int or value < 1):
            yield f"{name} must be a whole number of at least 1, not {value!r}"
        if name in ("sequence_parallel_mode", "online_quantization") and not isinstance(value, str | None):
            yield f"{name} must be a name or None, not {value!r}"
    if not isinstance(values["hsdp"], bool):
        yield f"hsdp must be True or False, not {values['hsdp']!r}"
    rank, size = values["tensor_parallel_rank"], values["tensor_parallel_size"]
    if rank is not None and (type(rank) is not int or type(size) is not int or not 0 <= rank < size):
        yield f"tensor_parallel_rank must be None or one of the ranks 0 to {size} - 1, not {rank!r}"
