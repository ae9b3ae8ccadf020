"""The server as a program: it draws what the model draws alone, and SIGTERM lets those finish who are served."""

from __future__ import annotations

import base64
import json
import signal
from pathlib import Path

import anyio
import anyio.to_thread
import httpx2
import pytest

from serve.digits import DigitModel, load_digits
from serve.inputs import Inputs
from tests.examples.serve.kit import EVENTS, PATH, Server, client_of
from tests.examples.serve.programs import Program, program
from tests.streamflow.kit import in_worker
from tests.streamflow.runtime.kit import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

REQUEST = {"prompt": "2026", "seed": 5, "num_steps": 20}


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_it_serves_until_sigterm_and_then_those_who_are_served(loop: str, tmp_path: Path) -> None:
    model = DigitModel(load_digits())
    expected = in_worker(lambda: model.draw(Inputs(prompt="2026", seed=5, num_steps=20), lambda done, steps: None))
    log = tmp_path / "log"
    with program(log, "serve", "--device", "cpu", "--loop", loop) as served:
        kinds, picture = anyio.run(_terminate_while_drawing, served)
        assert served.process.wait(PATIENCE_S) == 0, log.read_text()
    assert kinds.count("progress") == 20
    assert picture == expected
    assert "Traceback" not in log.read_text()


async def _terminate_while_drawing(served: Program) -> tuple[list[str], bytes]:
    """The events and the picture of a generation in the middle of which SIGTERM comes."""
    kinds, picture = [], b""
    async with client_of(served.url) as client:
        await Server(client, []).until_ready()
        async with client.stream("POST", PATH, json=REQUEST, headers=EVENTS) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("event: "):
                    kinds.append(line.removeprefix("event: "))
                elif line.startswith("data: ") and kinds[-1] == "image":
                    picture = base64.b64decode(json.loads(line.removeprefix("data: "))["png"])
                if kinds.count("progress") == 1 and line == "":
                    served.process.send_signal(signal.SIGTERM)
                    with anyio.fail_after(PATIENCE_S):
                        while await _accepts(client):
                            pass
    return kinds, picture


async def _accepts(client: httpx2.AsyncClient) -> bool:
    try:
        await client.get("/healthz")
    except (httpx2.ConnectError, httpx2.ReadError, httpx2.RemoteProtocolError):
        return False
    return True
