"""One peer of ``streamflow bench step``: makes the same model in a process of its own, and times its steps."""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import torch

from streamflow.tools.bench.children import answer
from streamflow.tools.bench.clock import timed_steps
from streamflow.tools.bench.digests import digest_of
from streamflow.tools.bench.flux_shaped import FluxShape, FluxShaped, random_inputs, random_model
from streamflow.tools.bench.peers import PEERS, PeerQuestion

#: Steps before any counts: the first one finds out the order, the second one prefetches by it.
NUM_WARM_UP_STEPS = 2


def measure(question: PeerQuestion) -> dict[str, Any]:
    """The median step at every picture size."""
    device, shape = torch.device(question.device), FluxShape(**question.shape)
    dtype = getattr(torch, question.dtype)
    model = random_model(shape, dtype, device).to("cpu")
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    PEERS[question.peer].apply(model, device)
    return {"sizes": {str(px): _measure_size(question, model, shape, dtype, px, device) for px in question.image_px}}


def _measure_size(
    question: PeerQuestion, model: FluxShaped, shape: FluxShape, dtype: torch.dtype, image_px: int, device: torch.device
) -> dict[str, Any]:
    inputs = random_inputs(shape, image_px, question.num_text, dtype, device)
    timed_steps(lambda: model(*inputs), NUM_WARM_UP_STEPS, device)
    seconds, result = timed_steps(lambda: model(*inputs), question.num_steps, device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"step_s": statistics.median(seconds), "digest": digest_of(result), "device_peak_bytes": peak}


if __name__ == "__main__":
    answer(measure(PeerQuestion(**json.loads(sys.argv[1]))))
