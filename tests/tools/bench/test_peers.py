"""Peers of ``streamflow bench step``: they compute the same, and one that cannot says why."""

from __future__ import annotations

import attrs
import pytest
import torch

from streamflow.tools.bench import peers
from streamflow.tools.bench.children import ChildAnswer
from streamflow.tools.bench.digests import digest_of
from streamflow.tools.bench.flux_shaped import FluxShape, random_inputs, random_model
from streamflow.tools.bench.peer_worker import measure
from streamflow.tools.bench.peers import PEERS, PeerQuestion, PeerReading, Standard, measure_peers
from streamflow.tools.bench.time_limit import TimeLimit

TINY = FluxShape(width=32, num_heads=2, num_double=2, num_single=2, text_width=8, in_channels=4)
CPU = torch.device("cpu")
STANDARD = Standard(image_px=64, link_limit_s=0.5, resident_s=2.0, digest="right")


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_computes_what_the_resident_model_does(name: str) -> None:
    question = PeerQuestion(name, attrs.asdict(TINY), "float32", [64, 80], num_text=4, num_steps=2, device="cpu")
    sizes = measure(question)["sizes"]
    assert set(sizes) == {"64", "80"}
    model = random_model(TINY, torch.float32, CPU)
    for px in (64, 80):
        with torch.no_grad():
            expected = model(*random_inputs(TINY, px, 4, torch.float32, CPU))
        assert sizes[str(px)]["digest"] == digest_of(expected)
        assert sizes[str(px)]["step_s"] > 0


async def readings_within(limit: TimeLimit) -> list[PeerReading]:
    return [reading async for reading in measure_peers([STANDARD], TINY, torch.float32, 4, 2, CPU, limit)]


@pytest.mark.anyio
async def test_readings_are_ratios_to_the_standard_and_missing_ones_have_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = {"step_s": 1.0, "digest": "right", "device_peak_bytes": 5}

    async def ask(module: str, question: dict[str, object], timeout_s: float) -> ChildAnswer:
        assert module == peers.WORKER
        if question["peer"] == "diffusers, by blocks":
            return ChildAnswer({"sizes": {"64": told}}, None)
        if question["peer"] == "diffusers, by leaves":
            return ChildAnswer({"sizes": {"64": {**told, "digest": "wrong"}}}, None)
        return ChildAnswer(None, "it was not done after 240 s")

    monkeypatch.setattr(peers, "ask_child", ask)
    by_blocks, by_leaves, accelerate = await readings_within(TimeLimit(None))
    assert (by_blocks.ratio_to_link_limit, by_blocks.ratio_to_resident, by_blocks.equal) == (2.0, 0.5, True)
    assert (by_blocks.problem, by_blocks.device_peak_bytes) == (None, 5)
    assert by_leaves.equal is False
    assert (accelerate.step_s, accelerate.problem) == (None, "it was not done after 240 s")


@pytest.mark.anyio
async def test_a_library_that_is_not_there_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    readings = await readings_within(TimeLimit(None))
    assert [reading.problem for reading in readings] == [f"{peer.library} is not installed" for peer in PEERS.values()]


@pytest.mark.anyio
async def test_peers_get_the_time_that_is_left_and_none_begins_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = [0.0], []

    async def ask(module: str, question: dict[str, object], timeout_s: float) -> ChildAnswer:
        given.append(timeout_s)
        now[0] += 30
        return ChildAnswer(None, "it was not done")

    monkeypatch.setattr(peers, "ask_child", ask)
    limit = TimeLimit(50.0, clock=lambda: now[0])
    readings = await readings_within(limit)
    assert given == [50.0, 20.0]
    assert [reading.problem for reading in readings] == ["it was not done"] * 2
    assert limit.left_out == ["accelerate, cpu_offload"]
