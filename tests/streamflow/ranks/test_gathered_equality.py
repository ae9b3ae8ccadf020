"""Whatever ranks gather, from whatever source: each rank's outputs are, to the byte, those of the resident model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import attrs
import pytest
from torch import nn

import streamflow
from streamflow.stages.ranks.signature import WaveSignature
from tests.ranks import Rank, run_ranks
from tests.streamflow.kit import resident_digests, run_calls, settled, sha256_of
from tests.streamflow.models import CALLS, CASES, Call, Case, Mlp, Stack, seeded
from tests.streamflow.ranks.joint import Seen, assert_nothing_left, backend_of, joined, opened

BY_NAME = {
    **{case.name: case for case in CASES},
    "1231 to 239": Case("1231 to 239", lambda: sized(1231, 239, 239, 1231), CALLS),
    "5 to 1": Case("5 to 1", lambda: sized(500, 100, 500, 100, 100), CALLS),
    "odd sizes": Case("odd sizes", lambda: sized(7, 1, 13, 3), CALLS),
}


def sized(*hidden: int) -> nn.Module:
    return seeded(lambda: Stack(Mlp(size) for size in hidden))


@attrs.frozen
class Trial:
    """A model, and how it is streamed: ``changes`` of options."""

    case: str
    changes: Mapping[str, Any] = attrs.Factory(dict)

    @property
    def given(self) -> Case:
        return BY_NAME[self.case]

    def options(self) -> dict[str, Any]:
        return {"plan": self.given.plan, "max_running_requests": 1, **self.changes}


def calls_of(rank: int, calls: Sequence[Call]) -> list[Call]:
    """Inputs of this rank's own."""
    return [(x * (1 + rank / 8) + rank, *others) for x, *others in calls]


async def digests(offload: streamflow.Offload, model: nn.Module, calls: Sequence[Call]) -> list[str]:
    wave = WaveSignature(((type(model).__name__, len(calls)),))
    outputs = await offload.request(wave=wave).run(run_calls, model, calls)
    return [sha256_of(output) for output in outputs]


def chunks(nbytes: int) -> dict[str, int]:
    return {"gather_chunk_bytes": nbytes}


IN_PIECES, IN_ONE = chunks(1024), chunks(1 << 26)
TRIALS: dict[int, list[Trial]] = {
    2: [
        Trial("1231 to 239", {"ranks": IN_PIECES, "transfer": "staged"}),
        Trial("every dtype", {"ranks": IN_PIECES}),
        Trial("quantized blocks", {"transfer": "staged", "staging_chunk_bytes": 4096}),
        Trial("blocks of several kinds", {"ranks": IN_ONE, "window_blocks": 1}),
        Trial("strides"),
        Trial("buffers", {"resident_blocks": 2}),
        Trial("several stacks", {"window_blocks": 3}),
        Trial("tied inside a block", {"resident_blocks": 1, "transfer": "staged"}),
    ],
    3: [
        Trial("5 to 1", {"ranks": IN_PIECES}),
        Trial("5 to 1", {"ranks": IN_ONE, "transfer": "staged", "resident_blocks": 2}),
        Trial("1231 to 239", {"ranks": IN_PIECES, "resident_blocks": 1}),
        Trial("odd sizes", {"ranks": chunks(256)}),
        Trial("every dtype", {"transfer": "staged", "window_blocks": 4}),
    ],
    4: [
        Trial("1231 to 239", {"ranks": IN_ONE, "window_blocks": 3}),
        Trial("odd sizes", {"transfer": "staged"}),
        Trial("quantized blocks", {"resident_blocks": 1}),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("size", TRIALS)
def test_outputs_are_those_of_the_resident_model(size: int) -> None:
    async def attempt(rank: Rank, trial: Trial) -> tuple[list[str], Seen]:
        model = trial.given.build()
        async with opened(rank, model, **trial.options()) as member:
            found = await digests(member.offload, model, calls_of(rank.rank, trial.given.calls))
            await settled(member.offload)
            await member.meet(f"done with {TRIALS[size].index(trial)}")
            return found, member.seen()

    def work(rank: Rank) -> object:
        before = joined(rank)

        async def main() -> list[tuple[list[str], Seen]]:
            return [await attempt(rank, trial) for trial in TRIALS[size]]

        answers = anyio.run(main, backend=backend_of(rank))
        assert_nothing_left(before)
        return answers

    answers = run_ranks(size, work)
    for number, trial in enumerate(TRIALS[size]):
        found = [answer[number][0] for answer in answers]
        case = trial.given
        expected = [resident_digests(case.build(), calls_of(rank, case.calls)) for rank in range(size)]
        assert found == expected, trial
        if trial.case != "every dtype":  # it saturates: the same for all inputs
            assert len({tuple(each) for each in found}) == size, "the ranks' outputs have to differ"
        for _, seen in (answer[number] for answer in answers):
            assert (seen.transfer, seen.state, seen.peak_is_small) == ("gathered", "ready", True), trial
            assert seen.num_walks == len(case.calls), trial
            assert seen.streamed_bytes > 0
            assert f"({trial.changes.get('transfer', 'direct')}:" in seen.reason
