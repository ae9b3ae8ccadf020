"""Small models, one for every way in which weights can lie in a model, each with the calls it is compared on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch import nn
from torch.nn import functional

from streamflow import OffloadPlan

WIDTH = 16

#: The positional arguments of one call of a model.
Call: TypeAlias = tuple[Any, ...]


@attrs.frozen
class Case:
    """A model and three calls of it. ``build`` gives the same weights every time.

    ``plan`` None: the model's own declaration, or discovery. ``streams``: whether a block has bytes of its own.
    """

    name: str
    build: Callable[[], nn.Module]
    calls: tuple[Call, ...]
    plan: OffloadPlan | None = None
    streams: bool = True

    def __str__(self) -> str:
        return self.name


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """What ``build`` returns, the same every time, ready for inference; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().eval().requires_grad_(False)


def some_inputs(count: int = 3, rows: int = 4, width: int = WIDTH) -> list[torch.Tensor]:
    """Inputs that differ from each other and not from run to run."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, width, generator=generator) for _ in range(count)]


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The blocks of a model that calls them so."""
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def block(model: nn.Module, index: int) -> Any:
    """One of them, whatever its class."""
    return blocks_of(model)[index]


class Mlp(nn.Module):
    """A residual block of two linears, with a persistent buffer; ``hidden`` sets its size."""

    scale: torch.Tensor

    def __init__(self, hidden: int = WIDTH, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.register_buffer("scale", torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x)))) * self.scale
        return out


class Stack(nn.Module):
    """A model whose blocks run one after the other, between a linear and a norm of its own."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.exit = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.exit(x)
        return out


def mlp_stack(num_blocks: int) -> nn.Module:
    """Blocks whose sizes alternate 5:1."""
    return seeded(lambda: Stack(Mlp(5 * WIDTH if index % 2 == 0 else WIDTH) for index in range(num_blocks)))


class TwoStacks(nn.Module):
    """Blocks that pass two tensors on, by keywords, then blocks that take one; a root parameter and root buffers."""

    steps: torch.Tensor
    table: torch.Tensor

    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Mlp(3 * WIDTH), Mlp()
            self.mix = nn.Parameter(torch.randn(2))

        def forward(
            self, image: torch.Tensor, text: torch.Tensor, *, shift: dict[str, torch.Tensor]
        ) -> tuple[torch.Tensor, torch.Tensor]:
            image = self.left(image) + self.mix[0] * text + shift["image"]
            return image, self.right(text) + self.mix[1] * image

    def __init__(self) -> None:
        super().__init__()
        self.double_blocks = nn.ModuleList(self.Double() for _ in range(3))
        self.single_blocks = nn.ModuleList(Mlp(2 * WIDTH) for _ in range(4))
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("steps", torch.arange(WIDTH, dtype=torch.float32))
        self.register_buffer("table", torch.linspace(-1, 1, WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        image, text = x + self.bias, x * self.table
        for block in self.double_blocks:
            image, text = block(image, text, shift={"image": self.steps})
        x = torch.cat([image, text])
        for block in self.single_blocks:
            x = block(x)
        return {"image": x[: len(image)], "text": x[len(image) :]}


class TiedInside(nn.Module):
    """One parameter under two names of a block, and views that share its memory without being it."""

    head: torch.Tensor
    later: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        memory = torch.randn(3 * WIDTH)
        self.whole = nn.Parameter(memory[: 2 * WIDTH])
        self.register_buffer("head", memory[:WIDTH])  # inside the parameter
        self.register_buffer("later", memory[WIDTH // 2 : 3 * WIDTH])  # half inside it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = self.whole.view(2, WIDTH)
        return torch.tanh(self.second(self.first(x)) * low + self.head * high + self.later[-WIDTH:])


def tied_across_blocks() -> nn.Module:
    """Every block and the root use one weight; two blocks share a buffer."""
    model = Stack(Mlp() for _ in range(5))
    blocks = [block for block in model.blocks if isinstance(block, Mlp)]
    for block in blocks[1:]:
        block.up.weight = blocks[0].up.weight
    model.enter.weight = blocks[0].down.weight
    blocks[4].scale = blocks[3].scale
    return model


class Buffers(nn.Module):
    """A block with persistent and other buffers, in itself and in a child."""

    kept: torch.Tensor
    lost: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.norm.running_mean = torch.randn(WIDTH)
        self.norm.running_var = torch.rand(WIDTH) + 0.5
        self.register_buffer("kept", torch.randn(WIDTH))
        self.register_buffer("lost", torch.linspace(1, 2, WIDTH), persistent=False)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("absent", None)
        self.register_parameter("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(x) * self.kept + self.lost * self.count)


class Strided(nn.Module):
    """A block of parameters and buffers that do not lie row by row."""

    stretched: torch.Tensor
    spread: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.rows = nn.Parameter(torch.randn(2 * WIDTH, WIDTH)[::2])
        self.columns = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH)[:, WIDTH : 2 * WIDTH])
        self.expanded = nn.Parameter(torch.randn(1, WIDTH).expand(WIDTH, WIDTH))
        fused = torch.randn(2 * WIDTH, WIDTH)
        self.query, self.key = (nn.Parameter(part) for part in fused.chunk(2))
        self.register_buffer("stretched", torch.randn(WIDTH, 1).expand(WIDTH, WIDTH))
        self.register_buffer("spread", torch.randn(2, WIDTH, 2).permute(2, 0, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in (self.transposed, self.rows, self.columns, self.expanded, self.query, self.key, self.stretched):
            x = torch.tanh(functional.linear(x, weight) + self.spread[0, 1])
        image = x.reshape(1, 2, -1, WIDTH // 2).contiguous(memory_format=torch.channels_last)
        out: torch.Tensor = self.conv(image)
        return out.reshape(x.shape)


def random_bits(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of any dtype and shape with random bytes in it (booleans stay booleans)."""
    plain = torch.empty(shape, dtype=dtype)
    high = 2 if dtype == torch.bool else 256
    return torch.randint(high, (plain.numel() * plain.element_size(),), dtype=torch.uint8).view(dtype).reshape(shape)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, element by element, as flat uint8."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


class Typed(nn.Module):
    """A block that holds one dtype: in a matrix, a scalar, an empty tensor and a buffer; every byte counts."""

    buffer: torch.Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.matrix = nn.Parameter(random_bits(dtype, (WIDTH, 4)), requires_grad=False)
        packed = "x2" in str(dtype)  # pairs in one element: files count the halves, and a scalar has none
        self.scalar = nn.Parameter(random_bits(dtype, (1,) if packed else ()), requires_grad=False)
        self.empty = nn.Parameter(random_bits(dtype, (0, 3)), requires_grad=False)
        self.register_buffer("buffer", random_bits(dtype, (5,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.empty.shape == (0, 3)
        tensors = (self.matrix, self.scalar, self.empty, self.buffer)
        bits = torch.cat([bits_of(tensor) for tensor in tensors]).float()
        weights = torch.arange(1, 1 + bits.numel(), dtype=torch.float32)
        return torch.tanh(x + (bits * weights).sum() / weights.sum() / 255)


def all_dtypes(names: Iterable[str]) -> list[torch.dtype]:
    """The dtypes of these names that the installed torch has."""
    return [getattr(torch, name) for name in names if hasattr(torch, name)]


class Quantized(nn.Module):
    """A block as quantizers leave it: packed integers, scales in another dtype, names that torch does not use."""

    qweight: torch.Tensor
    qzeros: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", random_bits(torch.uint8, (WIDTH, WIDTH // 2)))
        self.register_buffer("qzeros", torch.randint(16, (WIDTH, 1), dtype=torch.int32))
        self.weight_scale = nn.Parameter(torch.rand(WIDTH, 1, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.randn(WIDTH, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        quads = torch.stack([self.qweight & 15, self.qweight >> 4], dim=-1).flatten(1).to(torch.int32)
        weight = (quads - self.qzeros).float() * self.weight_scale.float() / 16
        return torch.tanh(functional.linear(x, weight, self.bias.float()))


class Experts(nn.Module):
    """A block with a module list inside, one of whose members does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate: torch.Tensor = self.gate(x)
        return torch.tanh(self.experts[2](gate) + self.experts[0](x))


class Idle(nn.Module):
    """A block without a tensor of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


class BehindProperty(nn.Module):
    """Its blocks are attributes; a property makes a list of them, as its class declares."""

    _layerwise_offload_blocks_attr = "blocks"

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.layers = nn.ModuleList(Mlp() for _ in range(3))
        self.extra = Mlp(2 * WIDTH)

    @property
    def blocks(self) -> list[nn.Module]:
        layers = self.inner.layers
        assert isinstance(layers, nn.ModuleList)
        return [*layers, self.extra]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Scheduled(nn.Module):
    """Runs the blocks that the call names, in the order that it names: skips, repeats, anything."""

    def __init__(self, num_blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(WIDTH * (1 + index % 3)) for index in range(num_blocks))

    def forward(self, x: torch.Tensor, schedule: Sequence[int]) -> torch.Tensor:
        for index in schedule:
            x = self.blocks[index](x)
        return x


def same_block_twice() -> nn.Module:
    """A list in which one module comes twice, with others between."""
    blocks = [Mlp() for _ in range(4)]
    return Stack([blocks[0], blocks[1], blocks[2], blocks[1], blocks[3]])


class Bare(nn.Module):
    """Nothing outside the blocks but one parameter, and nothing declared."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gain = nn.Parameter(torch.randn(()))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.gain.dtype)
        for layer in self.layers:
            x = torch.relu(layer(x)) * self.gain
        return x


CALLS = tuple((x,) for x in some_inputs())
DTYPE_NAMES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)


def _schedules(*schedules: Sequence[int]) -> tuple[Call, ...]:
    return tuple((x, tuple(schedule)) for x, schedule in zip(some_inputs(len(schedules)), schedules, strict=True))


def _case(name: str, build: Callable[[], nn.Module], calls: tuple[Call, ...] = CALLS, **more: Any) -> Case:
    return Case(name, lambda: seeded(build), calls, **more)


CASES = (
    Case("unequal blocks", lambda: mlp_stack(5), CALLS),
    _case("several stacks", TwoStacks),
    _case("one stack of several", TwoStacks, plan=OffloadPlan(stacks="single_blocks")),
    _case("tied inside a block", lambda: Stack(TiedInside() for _ in range(4))),
    _case("tied across blocks and root", tied_across_blocks),
    _case("buffers", lambda: Stack(Buffers() for _ in range(4))),
    _case("strides", lambda: Stack(Strided() for _ in range(3))),
    _case("every dtype", lambda: Stack(Typed(dtype) for dtype in all_dtypes(DTYPE_NAMES))),
    _case("quantized blocks", lambda: Stack(Quantized() for _ in range(4))),
    _case("blocks of several kinds", lambda: Stack([Mlp(), Experts(), Idle(), Quantized(), TiedInside()])),
    _case(
        "blocks without tensors",
        lambda: Stack(Idle() for _ in range(3)),
        plan=OffloadPlan(stacks="blocks"),
        streams=False,
    ),
    _case("blocks behind a property", BehindProperty),
    _case("the same block twice", same_block_twice),
    _case("bfloat16", lambda: Bare(torch.bfloat16)),
    _case("float16", lambda: Bare(torch.float16)),
    _case("float64", lambda: Bare(torch.float64)),
    _case("in order", Scheduled, _schedules(range(6), range(6), range(6))),
    _case("step cache", Scheduled, _schedules(range(6), (0, 1, 5), range(6))),
    _case("always first and last only", Scheduled, _schedules((0, 5), (0, 5), (0, 5))),
    _case("out of order", Scheduled, _schedules((3, 1, 5, 0, 2, 4), range(6), (5, 4, 3, 2, 1, 0))),
    _case("blocks repeated", Scheduled, _schedules((0, 0, 1, 2, 2, 2, 3, 1), (1, 2, 3, 4, 1), (5, 5, 0, 5))),
    _case("nothing at first", Scheduled, _schedules((), range(6), ())),
)
