"""What every test gets: both event loops, one compute thread, no network, and a check that no thread is left behind."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

# Before anything imports a library that reads them; programs started by tests inherit them. One compute thread: the
# reference and the streamed run must sum in the same order, on any machine.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import hypothesis
import pytest
import torch

# Here, before any test imports one of them: kits explain their failed assertions as test modules do.
pytest.register_assert_rewrite(
    "tests.examples.serve.kit",
    "tests.streamflow.kit",
    "tests.streamflow.models",
    "tests.streamflow.real_models.kit",
    "tests.streamflow.runtime.interrupts",
    "tests.streamflow.store.kit",
)

ROOT = Path(__file__).resolve().parent.parent

# Examples take longer on a busy machine: a slow one is no fault. In CI the same examples run every time.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)


def pytest_configure(config: pytest.Config) -> None:
    """Choose the examples of the property tests, and see to it that the settings above came in time."""
    if torch.get_num_threads() != 1:
        raise pytest.UsageError("torch was imported before tests/conftest.py could limit it to one compute thread")
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the `gpu` tests out where there is no CUDA device; asking for them there by ``-m gpu`` is an error.

    Where there is one, they run one after the other, however many processes run the others.
    """
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if torch.cuda.is_available():
        for item in needs_gpu:
            item.add_marker(pytest.mark.xdist_group("gpu"))
        return
    if "gpu" in config.getoption("markexpr").replace("not gpu", ""):
        raise pytest.UsageError("tests marked gpu were asked for, but torch finds no CUDA device on this machine")
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=needs_gpu)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what pytest and the imports have made, which stays, out of what the collector looks through from now on.

    Many tests collect before they look for what is left: each would look through the whole suite, too, for a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The event loop of a test marked `anyio`: it runs once under each."""
    return str(request.param)


def _streamflow_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("streamflow")}


@pytest.fixture(autouse=True)
def no_thread_is_left_behind() -> Iterator[None]:
    """Every thread that streamflow started for the test has ended by its end, or does so within two seconds."""
    before = _streamflow_threads()
    yield
    deadline = time.monotonic() + 2.0
    while (left := _streamflow_threads() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"threads left behind: {sorted(thread.name for thread in left)}"


@pytest.fixture(scope="session", autouse=True)
def one_copy_of_each_module() -> Iterator[None]:
    """No test, and nothing a test started, imported the engine or the programs by their top-level folder names."""
    yield
    copies = [
        f"{name} from {module.__file__}"
        for name, module in sys.modules.items()
        if name.partition(".")[0] in ("stages", "tools")
        and Path(getattr(module, "__file__", None) or "/").resolve().is_relative_to(ROOT)
    ]
    assert not copies, f"second copies of modules were imported: {copies}"
