"""What would help, and how much: advice that follows from a report's numbers. Pure: no torch, no clock."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from streamflow.tools.terminal import format_bytes, format_seconds
from streamflow.tools.trace.analysis import ComponentReport

#: Advice that would recover a smaller share of the time is not given.
LEAST_SHARE = 0.02


@attrs.frozen
class Advice:
    """What to do, and the ``seconds`` of all walks that it would recover at most."""

    text: str
    seconds: float
    share: float


def advise(report: ComponentReport, metadata: Mapping[str, Any]) -> list[Advice]:
    """What would recover time, the most first; what saves memory at no cost comes last."""
    whole = report.sum_of("seconds")
    if not whole or not report.walks:
        return []
    found = [Advice(text, seconds, seconds / whole) for text, seconds in _by_cause(report, metadata)]
    kept = [advice for advice in found if advice.share >= LEAST_SHARE]
    return [*sorted(kept, key=lambda advice: -advice.share), *_savings(report, metadata)]


def _by_cause(report: ComponentReport, metadata: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    seconds = report.by_cause()
    yield from _against_transfer(report, seconds["transfer"])
    yield from _against_packing(seconds["packing"], metadata)
    yield _wider_window(metadata), seconds["slot"]
    yield _free_loop(report), seconds["loop"]
    yield _foreseeable_order(report), seconds["on_demand"]
    yield _see_to_rank(report), seconds["gather"]
    yield "a shorter admission_window_s: passes waited for others to join their walk", seconds["walk"]
    yield _more_memory(report), seconds["allocator"]


def _against_transfer(report: ComponentReport, blocked: float) -> Iterator[tuple[str, float]]:
    num_walks, nbytes = len(report.walks), report.block_bytes
    if not report.link_bytes_per_s or not nbytes:
        return
    block_s = nbytes / report.link_bytes_per_s
    num_streamed = report.sum_of("streamed_bytes") / num_walks / nbytes
    needed = min(max(1, math.floor(num_streamed) - 1), math.ceil(blocked / num_walks / block_s))
    memory = f"{format_bytes(round(needed * nbytes))} of device memory"
    saving = f"{format_seconds(needed * block_s)} of transfer out of each walk"
    yield f"{needed} more resident blocks, which take {memory} and {saving}", min(blocked, needed * block_s * num_walks)
    if all(walk.num_passes == 1 for walk in report.walks):
        yield "shared walks: two requests that walk together share each transfer", blocked / 2


def _against_packing(blocked: float, metadata: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    choice, config = metadata.get("transfer", {}), metadata["config"]
    reason = choice.get("transfer_reason", "not known")
    text = f"a direct transfer, which needs no packing (why it is staged now: {reason})"
    yield f"{text}; the device reads page-locked memory by itself (pin_host_memory=True, transfer='auto')", blocked
    threads, cores = config.get("packing_threads"), metadata.get("num_cores", 1)
    if isinstance(threads, int) and threads < cores:
        yield f"more packing threads: packing_threads={threads + 1}, of {cores} cores", blocked / (threads + 1)


def _wider_window(metadata: Mapping[str, Any]) -> str:
    wider = metadata["config"].get("window_blocks", 1) + 1
    why = "the link stood idle because the slot for the next block was still in use"
    return f"a wider window: window_blocks={wider} (one more slot of device memory); {why}"


def _free_loop(report: ComponentReport) -> str:
    late = f"{report.worst_answer_s * 1e3:.1f} ms late (at {report.worst_answer_at:.3f} s)"
    what = "move blocking calls to threads, or give the offload a loop of its own with streamflow.start_offload"
    return f"keep the event loop free: it answered up to {late}; {what}"


def _foreseeable_order(report: ComponentReport) -> str:
    what = "declare the blocks in the order in which they run (plan=), or keep those that come out of turn resident"
    return f"a foreseeable order: {report.num_on_demand} fetches were on demand; {what}"


def _see_to_rank(report: ComponentReport) -> str:
    if report.slowest_rank is None:
        return "the traces of all ranks in one (streamflow trace merge): it says which rank gathers waited for, if any"
    return f"look at rank {report.slowest_rank}: the others waited for it before they could gather"


def _more_memory(report: ComponentReport) -> str:
    why = f"the allocator gave its cache back {report.num_retries} times, which stalls the device"
    return f"more room in device memory: {why}; use fewer residents or a smaller window"


def _savings(report: ComponentReport, metadata: Mapping[str, Any]) -> Iterator[Advice]:
    sizes = metadata.get("sizes", {})
    spare = report.sum_of("compute_limit_s") - report.sum_of("link_limit_s")
    block_s = report.block_bytes / report.link_bytes_per_s * len(report.walks) if report.link_bytes_per_s else 0.0
    residents = sizes.get("num_resident_blocks", 0)
    if report.bound_by == "compute" and residents and block_s and spare > block_s:
        fewer = min(residents, math.floor(spare / block_s * 0.9))
        if fewer:
            saved = format_bytes(round(fewer * report.block_bytes))
            yield Advice(f"{fewer} resident blocks fewer would cost no time and save {saved} of device memory", 0, 0)
