"""Trials: everything about a short life of an engine on the sim device, drawn from one seed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from streamflow.stages.errors import StreamflowError
from streamflow.stages.opening import EngineOptions, OpenTransfer
from streamflow.stages.statistics import EngineStatistics
from streamflow.stages.testing.blocks import ToyBlocks, toy_blocks
from streamflow.stages.testing.sim import SimDevice
from streamflow.stages.testing.walker import open_walker
from streamflow.stages.walk_sources import ImmediateWalks, SharedWalks, WalkSource

#: Makes the way to open a transfer for these blocks.
OpenTransferFor = Callable[[ToyBlocks], OpenTransfer]

MAX_BLOCKS = 9
MAX_WINDOW = 4
NUM_PASSES = 3
#: Long enough for others to come and go, and for the loop to act on it.
DAWDLE_S = 0.0005


class TrialError(StreamflowError, RuntimeError):
    """An engine streamed exactly, but not as it should: too much memory, or nothing streamed at all."""


@attrs.frozen(eq=False)
class Trial:
    """``components``: the blocks of each, by name. ``passes``: for each place its passes, each a list of blocks of one
    component. ``walk_source``: who walks together. ``slow_place``: one that dawdles in each block (None: none does).
    """

    seed: int
    blocks: ToyBlocks
    components: Mapping[str, tuple[int, ...]]
    residents: tuple[int, ...]
    walk_source: WalkSource
    slow_place: int | None
    options: EngineOptions
    passes: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def streams_anything(self) -> bool:
        """Whether a pass visits a block that is not resident."""
        visited = {block for passes in self.passes for visits in passes for block in visits}
        return bool(visited - set(self.residents))

    def __str__(self) -> str:
        sizes = [image.nbytes for image in self.blocks.images.values()]
        return (
            f"seed {self.seed}: images of {sizes} bytes, components {dict(self.components)}, "
            f"residents {self.residents}, {self.options}, {self.walk_source}, {self.passes}"
        )


def draw_trial(seed: int) -> Trial:
    """1 to 9 blocks of unequal sizes in one component or two, a window of 1 to 4, residents or none, one to four
    places, and three passes in each: in order, with blocks left out, out of turn, or with blocks that come again. Those
    who wait walk together, up to a number of passes; or passes of the one component wait until every place has one.
    """
    draw = random.Random(seed)
    num_blocks = draw.randint(1, MAX_BLOCKS)
    sizes = [[draw.choice((0, 1, 100, 256, 700, 3000)) for _ in range(draw.randint(1, 4))] for _ in range(num_blocks)]
    residents = [block for block in range(num_blocks) if draw.random() < 0.2] if draw.random() < 0.5 else []
    num_places = draw.choice((1, 2, 2, 3, 4))
    options = EngineOptions(
        window_slots=draw.randint(1, MAX_WINDOW),
        num_places=num_places,
        run_ahead_blocks=draw.choice((None, None, 1, 3)),
        poison_freed_slots=draw.choice((False, True)),
    )
    components = _draw_components(draw, num_blocks)
    passes = tuple(
        tuple(_draw_visits(draw, draw.choice(list(components.values())), residents) for _ in range(NUM_PASSES))
        for _ in range(num_places)
    )
    source: WalkSource = SharedWalks(draw.randint(1, num_places), draw.choice((0.0, 0.001)))
    if len(components) == 1 and draw.random() < 0.5:
        source = ImmediateWalks(min_passes=num_places)
    slow_place = draw.randrange(num_places) if num_places > 1 and draw.random() < 0.5 else None
    return Trial(seed, toy_blocks(sizes, seed), components, tuple(residents), source, slow_place, options, passes)


def _draw_components(draw: random.Random, num_blocks: int) -> dict[str, tuple[int, ...]]:
    if num_blocks == 1 or draw.random() < 0.5:
        return {"first": tuple(range(num_blocks))}
    split = draw.randint(1, num_blocks - 1)
    return {"first": tuple(range(split)), "second": tuple(range(split, num_blocks))}


def _draw_visits(draw: random.Random, blocks: Sequence[int], residents: Sequence[int]) -> tuple[int, ...]:
    visits = _draw_any_visits(draw, blocks)
    streamed = [block for block in blocks if block not in residents]
    if streamed and not set(streamed) & set(visits):
        return (*visits, draw.choice(streamed))  # a pass that needs no walk would leave other places waiting for one
    return visits


def _draw_any_visits(draw: random.Random, blocks: Sequence[int]) -> tuple[int, ...]:
    kind = draw.choice(("in order", "in order", "left out", "out of turn", "again"))
    if kind == "left out":
        return tuple(block for block in blocks if draw.random() < 0.6)
    if kind == "out of turn":
        return tuple(draw.sample(blocks, draw.randint(1, len(blocks))))
    if kind == "again":
        return tuple(draw.choice(blocks) for _ in range(2 * len(blocks)))
    return tuple(blocks)


async def run_trial(trial: Trial, open_transfer: OpenTransferFor) -> EngineStatistics:
    """Run all passes, and return the statistics from before closing.

    :raises Exception: what the engine met, or `WrongBytesError`, or what the sim device found left behind.
    :raises TrialError: if the engine used more memory than window, residents and scratch, or streamed nothing.
    """
    device = SimDevice(trial.seed)
    async with open_walker(
        device,
        trial.blocks,
        trial.options,
        open_transfer(trial.blocks),
        residents=trial.residents,
        walk_source=trial.walk_source,
        components=trial.components,
    ) as walker:
        walker.inside = lambda place, block: time.sleep(DAWDLE_S if place == trial.slow_place else 0.0)
        await walker.run(*trial.passes)
        statistics = walker.engine.statistics()
    _check(trial, statistics)
    return statistics


def _check(trial: Trial, statistics: EngineStatistics) -> None:
    declared = statistics.window_bytes + statistics.resident_bytes + statistics.scratch_bytes
    if statistics.device_peak_bytes > declared:
        raise TrialError(f"{trial}: the device peak is {statistics.device_peak_bytes} bytes, more than {declared}")
    if trial.streams_anything and not statistics.num_fetches:
        raise TrialError(f"{trial}: nothing was streamed")


@attrs.frozen(eq=False)
class Caught:
    """The first trial that failed, and how."""

    trial: Trial
    failure: StreamflowError


async def first_failure(seeds: Iterable[int], open_transfer: OpenTransferFor) -> Caught | None:
    """Run the trials of ``seeds`` until one fails with an error of ours; None if all are exact.

    :raises BaseException: any other error.
    """
    for seed in seeds:
        trial = draw_trial(seed)
        try:
            await run_trial(trial, open_transfer)
        except StreamflowError as failure:
            return Caught(trial, failure)
    return None
