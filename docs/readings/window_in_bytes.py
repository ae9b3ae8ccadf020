"""What a window measured in bytes would give, by a model of FLUX.1's step: python docs/readings/window_in_bytes.py.

One copy after the other over a link of 55 GB/s, one block after the other at 550 TFLOP/s (both as measured on an H200),
each block when its copy has ended, each copy when there is room. 19 double blocks of 680 MB, each half of whose weights
is for one kind of tokens, and 38 single blocks of 283 MB; a width of 3072, 512 tokens of text.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Sequence

LINK, FLOPS, STEPS = 55e9, 550e12, 6
DOUBLE_BYTES, SINGLE_BYTES = 680e6, 283e6

Block = tuple[float, float]


def blocks_of(px: int) -> list[Block]:
    """The bytes of each block, and the seconds that it computes."""
    tokens = (px // 16) ** 2 + 512
    attention = 4 * tokens**2 * 3072
    double, single = 2 * tokens * 170e6 + attention, 2 * tokens * 141e6 + attention
    return [(DOUBLE_BYTES, double / FLOPS)] * 19 + [(SINGLE_BYTES, single / FLOPS)] * 38


def step_time(
    blocks: Sequence[Block],
    *,
    slots: int = 10**6,
    window_bytes: float = float("inf"),
    residents: Collection[int] = (),
) -> float:
    """Seconds of one step, once it is steady, with room for ``slots`` blocks and ``window_bytes`` beside residents."""
    link = done = held_bytes = 0.0
    held: deque[tuple[float, float]] = deque()
    ends = []
    for _ in range(STEPS):
        for block, (nbytes, compute) in enumerate(blocks):
            if block in residents:
                done += compute
                continue
            while len(held) >= slots or held_bytes + nbytes > window_bytes:
                freed_at, freed_bytes = held.popleft()
                held_bytes -= freed_bytes
                link = max(link, freed_at)
            link += nbytes / LINK
            done = max(done, link) + compute
            held.append((done, nbytes))
            held_bytes += nbytes
        ends.append(done)
    return (ends[-1] - ends[-4]) / 3


def main() -> None:
    """Steps over the larger of the two limits, for some sizes of pictures."""
    sys.stdout.write("px    limit  2 slots  as many bytes  3/4 of them\n")
    for px in (512, 1024, 1280, 1408, 1536, 1664, 1792, 2048):
        blocks = blocks_of(px)
        limit = max(sum(nbytes for nbytes, _ in blocks) / LINK, sum(compute for _, compute in blocks))
        times = [
            step_time(blocks, slots=2),
            step_time(blocks, window_bytes=2 * DOUBLE_BYTES),
            step_time(blocks, window_bytes=1.5 * DOUBLE_BYTES),
        ]
        ratios = "  ".join(f"{time / limit:7.3f}" for time in times)
        sys.stdout.write(f"{px:4d}  {limit:.3f}  {ratios}\n")


if __name__ == "__main__":
    main()
