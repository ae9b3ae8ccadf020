"""Ranks that are processes: what their shared copy costs each of them, and that it goes when they go, however."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import anyio.to_thread
import attrs
import pytest

from streamflow.ranks.agreement import Agreement
from streamflow.ranks.errors import WeightsDifferError
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.ranks.errors import RankLostError
from tests.ranks import forked_ranks, run_ranks
from tests.streamflow.ranks.kit import STEPS, copies_left, opened
from tests.streamflow.ranks.processes import Matrices, are_right, in_rank

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

MIB = 1 << 20
MODEL_BYTES = 64 * MIB
#: The window (2 MiB), and what threads and the interpreter take more or less from one reading to the next.
NOISE_BYTES = 5 * MIB


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_takes_its_part_of_one_copy_and_nothing_of_its_own(size: int) -> None:
    command = [sys.executable, "-m", "tests.streamflow.ranks.processes", str(size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=80, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert len(told) == size
    for rank in told:
        before = rank["readings"].pop("before")
        more = {when: {kind: now[kind] - before[kind] for kind in now} for when, now in rank["readings"].items()}
        for kind in ("Pss", "Private_Dirty"):
            assert more["loaded"][kind] == pytest.approx(MODEL_BYTES, abs=NOISE_BYTES)
        for when in ("open", "closed"):
            assert more[when]["Pss"] == pytest.approx(MODEL_BYTES / size, abs=NOISE_BYTES)
            assert more[when]["Private_Dirty"] < NOISE_BYTES
        assert (rank["is_right"], rank["left"]) == ([True, True], [])


def test_a_rank_with_other_weights_is_named_on_all() -> None:
    changed = "blocks.7.weight"

    async def body(agreement: Agreement) -> Any:
        model = Matrices(64)
        if agreement.rank == 2:
            model.get_parameter(changed).data[-1, -1] += 1
        last = model.get_parameter(changed)[-1, -1].clone()
        try:
            async with opened(model, agreement, {"packing_threads": 2}, CpuDevice()):
                return "it was opened"
        except WeightsDifferError as failure:
            found = (failure.rank, failure.block, failure.tensor)
        is_right = are_right(model, changed) and bool(model.get_parameter(changed)[-1, -1] == last)
        return found, is_right, copies_left()

    assert run_ranks(3, in_rank(body)) == [((2, "blocks.7", changed), True, [])] * 3


@attrs.define
class Dying:
    """An agreement of a rank that is killed before it agrees on ``step``."""

    agreement: Agreement
    step: str

    @property
    def rank(self) -> int:
        return self.agreement.rank

    @property
    def size(self) -> int:
        return self.agreement.size

    async def agree(self, name: str, value: object) -> list[Any]:
        if name == self.step:
            os.kill(os.getpid(), signal.SIGKILL)
        return await self.agreement.agree(name, value)


@pytest.mark.parametrize(("step", "killed"), [(step, index % 2 * 2) for index, step in enumerate(STEPS)])
def test_a_rank_that_is_killed_leaves_nothing_and_the_others_their_weights(step: str, killed: int) -> None:
    async def body(agreement: Agreement) -> Any:
        model = Matrices(64)
        mortal = Dying(agreement, step) if agreement.rank == killed else agreement
        try:
            async with opened(model, mortal, {"packing_threads": 2}, CpuDevice(), is_required=False):
                return "it was opened"
        except RankLostError as failure:
            lost = failure.rank
        is_right = are_right(model)
        del model
        return lost, is_right, copies_left()

    with forked_ranks(3, in_rank(body)) as ranks:
        assert ranks.answers(of={0, 1, 2} - {killed}) == [(killed, True, [])] * 2


LISTING = "import os; print([os.readlink(fd.path) for fd in os.scandir('/proc/self/fd') if os.path.lexists(fd.path)])"


def test_forked_children_read_the_weights_and_change_their_own_and_programs_get_nothing() -> None:
    async def body(agreement: Agreement) -> Any:
        model = Matrices(64)
        async with opened(model, agreement, {"packing_threads": 2}, CpuDevice()):
            command = [sys.executable, "-c", LISTING]
            started = await anyio.to_thread.run_sync(
                lambda: subprocess.run(command, capture_output=True, text=True, check=True, close_fds=False).stdout
            )
        pid = os.fork()
        if not pid:
            was_right = are_right(model)
            model.head.weight.data.zero_()
            os._exit(0 if was_right and not model.head.weight.any() else 1)
        code = os.waitstatus_to_exitcode((await anyio.to_thread.run_sync(os.waitpid, pid, 0))[1])
        await agreement.agree("all have forked", None)
        is_right = are_right(model)
        del model
        return "memfd" in started, code, is_right, copies_left()

    assert run_ranks(2, in_rank(body)) == [(False, 0, True, [])] * 2
