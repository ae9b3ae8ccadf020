"""A process that was forked after opening is told so, instead of waiting for threads that it has not."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import pytest

import streamflow
from streamflow.errors import ForkedOffloadError
from tests.streamflow.runtime.kit import make_subject

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]

IS_TOLD, IS_NOT = 17, 18


def in_child(use: Callable[[], object], parent: int) -> int:
    """The exit status of a forked child that uses an offload: whether it was told whose it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that other threads run is what is tested
        child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = IS_NOT
    try:
        use()
    except ForkedOffloadError as failure:
        if (failure.opened_by, failure.used_by) == (parent, os.getpid()):
            status = IS_TOLD
    finally:
        os._exit(status)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
async def test_a_forked_child_is_told_and_its_parent_goes_on() -> None:
    subject = make_subject()
    async with streamflow.open_offload(subject.model) as offload:
        await subject.check_next(offload)
        run = offload.run(subject.forward)
        assert in_child(lambda: run.send(None), os.getpid()) == IS_TOLD
        run.close()
        assert in_child(subject.forward, os.getpid()) == IS_TOLD
        assert in_child(lambda: subject.model.blocks[0](subject.inputs), os.getpid()) == IS_TOLD  # type: ignore[index]
        assert in_child(lambda: offload.statistics(), os.getpid()) == IS_NOT
        await subject.check_next(offload)
