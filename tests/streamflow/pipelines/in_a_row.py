"""A program that makes many requests in a row of each family: ``python -m tests.streamflow.pipelines.in_a_row``.

Too long for the suite. The names of families may be given; else all are run. Prints a line of JSON for each: how many
of the pictures were equal to the resident pipeline's, the device's peak after the tenth request and after the last, and
by how much the process grew between the two.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import anyio
import anyio.to_thread
import torch

import streamflow
from tests.streamflow.devices import FarCpuDevice
from tests.streamflow.kit import sha256_of
from tests.streamflow.pipelines.families.all import FAMILIES
from tests.streamflow.pipelines.families.family import Family
from tests.streamflow.pipelines.kit import ready, resident_set_bytes

NUM_REQUESTS, SETTLED_AFTER = 50, 10


async def in_a_row(family: Family) -> dict[str, Any]:
    """What came of the requests."""
    given = await anyio.to_thread.run_sync(ready, family)
    num_equal, peaks, sizes = 0, [], []
    async with streamflow.open_offload(given.pipeline, device=FarCpuDevice()) as offload:
        for number in range(1, NUM_REQUESTS + 1):
            made = await offload.run(family.generate, given.pipeline, 0)
            num_equal += sha256_of(made) == given.images[0]
            if number in (SETTLED_AFTER, NUM_REQUESTS):
                peaks.append(offload.statistics().engine.device_peak_bytes)
                gc.collect()
                sizes.append(resident_set_bytes())
        num_streamed = offload.statistics().engine.streamed_bytes
    return {
        "family": family.name,
        "num_equal": num_equal,
        "device_peak_bytes": peaks,
        "host_growth_bytes": sizes[1] - sizes[0],
        "streamed_bytes": num_streamed,
    }


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    for family in FAMILIES:
        if not names or family.name in names:
            sys.stdout.write(json.dumps(anyio.run(in_a_row, family)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
