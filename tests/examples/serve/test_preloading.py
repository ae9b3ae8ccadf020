"""A parent that loads the model before it forks its workers, which serve it, each with an offload of its own."""

from __future__ import annotations

import signal
from pathlib import Path

import anyio
import httpx2
import pytest

from serve.digits import DigitModel, load_digits
from serve.inputs import Inputs
from tests.examples.serve.kit import PATH, client_of
from tests.examples.serve.preloading import NUM_WORKERS, SERVERS
from tests.examples.serve.programs import Program, program
from tests.streamflow.kit import in_worker
from tests.streamflow.runtime.kit import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * PATIENCE_S)]

REQUEST = {"prompt": "31", "seed": 3, "num_steps": 2}


@pytest.mark.parametrize("loop", SERVERS)
def test_workers_serve_the_model_that_was_loaded_before_they_were_forked(loop: str, tmp_path: Path) -> None:
    model = DigitModel(load_digits())
    expected = in_worker(lambda: model.draw(Inputs(prompt="31", seed=3, num_steps=2), lambda done, steps: None))
    log = tmp_path / "log"
    with program(log, "tests.examples.serve.preloading", "--loop", loop) as served:
        pictures = anyio.run(_draw_with_all, served)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(PATIENCE_S) == 0, log.read_text()
    assert pictures == [expected] * (3 * NUM_WORKERS)


async def _draw_with_all(served: Program) -> list[bytes]:
    """Several pictures, each drawn by whichever worker takes the connection."""
    async with client_of(served.url) as client:
        return [await _draw(client) for _ in range(3 * NUM_WORKERS)]


async def _draw(client: httpx2.AsyncClient) -> bytes:
    with anyio.fail_after(PATIENCE_S):
        while (answer := await client.post(PATH, json=REQUEST)).status_code == 503:
            assert answer.json()["error"]["code"] == "not_ready"
            await anyio.sleep(0.05)
    assert answer.status_code == 200
    return answer.content
