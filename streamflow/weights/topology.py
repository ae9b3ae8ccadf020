"""How a model is spread and converted, as far as its checkpoint source must know."""

from __future__ import annotations

import attrs


def _positive(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{attribute.name} must be a whole number of at least 1, not {value!r}")


@attrs.frozen
class WeightTopology:
    """What happens to weights between file and device.

    ``tensor_parallel_size`` counts ranks that hold different parts of each tensor; ``hsdp`` says that parameters are
    sharded by hybrid sharded data parallelism; ``online_quantization`` names the method that converts weights while
    they load, None if there is none.

    :raises ValueError: if ``tensor_parallel_size`` is below 1.
    """

    tensor_parallel_size: int = attrs.field(default=1, validator=_positive)
    hsdp: bool = False
    online_quantization: str | None = None
