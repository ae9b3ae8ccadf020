"""streamflow is a quiet guest: it leaves torch, logging, signals, the interpreter and the context as they are."""

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import gc
import locale
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import streamflow
from tests.streamflow.devices import FarCpuDevice
from tests.streamflow.kit import run_calls, save_checkpoint
from tests.streamflow.models import CALLS, mlp_stack

pytestmark = pytest.mark.anyio

variable: contextvars.ContextVar[str] = contextvars.ContextVar("of a caller")

TORCH_SETTINGS: dict[str, Callable[[], Any]] = {
    "threads": torch.get_num_threads,
    "grad mode": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "deterministic, warn only": torch.is_deterministic_algorithms_warn_only_enabled,
    "fill uninitialised": lambda: getattr(torch.utils.deterministic, "fill_uninitialized_memory"),  # noqa: B009
    "matmul precision": torch.get_float32_matmul_precision,
    "tf32 in matmul": lambda: torch.backends.cuda.matmul.allow_tf32,
    "reduced precision in matmul": lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    "cudnn": lambda: (
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.allow_tf32,
    ),
    "mkldnn": lambda: torch.backends.mkldnn.is_available(),
    "attention": lambda: (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    ),
    "autocast": lambda: (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    ),
    "anomalies": torch.is_anomaly_enabled,
    "flush denormals": lambda: (torch.tensor([1e-310], dtype=torch.float64) * 1).item() == 0.0,
    "printing": lambda: dict(vars(torch._tensor_str.PRINT_OPTS)),
    "random state": lambda: torch.random.get_rng_state().sum().item(),
    "cuda is untouched": torch.cuda.is_initialized,
    "warn always": torch.is_warn_always_enabled,
}

PROCESS_SETTINGS: dict[str, Callable[[], Any]] = {
    "signals": lambda: {number: signal.getsignal(number) for number in signal.valid_signals()},
    "excepthook": lambda: sys.excepthook,
    "thread excepthook": lambda: threading.excepthook,
    "unraisable hook": lambda: sys.unraisablehook,
    "display hook": lambda: sys.displayhook,
    "trace and profile": lambda: (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()),
    "switch interval": sys.getswitchinterval,
    "recursion limit": sys.getrecursionlimit,
    "path": lambda: list(sys.path),
    "standard streams": lambda: (sys.stdout, sys.stderr, sys.stdin),
    "collector": lambda: (gc.isenabled(), gc.get_threshold(), list(gc.callbacks)),
    "warnings": lambda: (warnings.showwarning, list(warnings.filters)),
    "faulthandler": faulthandler.is_enabled,
    "environment": lambda: dict(os.environ),
    "folder": os.getcwd,
    "umask and locale": lambda: locale.setlocale(locale.LC_ALL),
    "cores": lambda: os.sched_getaffinity(0),
    "random": random.getstate,
    "event loop policy": lambda: getattr(asyncio.events, "_event_loop_policy", None),
    "thread stack size": threading.stack_size,
}


def logging_settings() -> dict[str, Any]:
    """Every logger that is configured at all, by name; loggers that were only made are as good as none."""

    def of(logger: logging.Logger) -> tuple[Any, ...]:
        return logger.level, list(logger.handlers), list(logger.filters), logger.propagate, logger.disabled

    loggers = {"": logging.getLogger(), **logging.root.manager.loggerDict}
    configured = {name: of(logger) for name, logger in loggers.items() if isinstance(logger, logging.Logger)}
    unconfigured: tuple[Any, ...] = (logging.NOTSET, [], [], True, False)
    return {
        "loggers": {name: found for name, found in configured.items() if found != unconfigured},
        "disabled": logging.root.manager.disable,
        "class": logging.getLoggerClass(),
        "record factory": logging.getLogRecordFactory(),
        "captures warnings": logging._warnings_showwarning is not None,  # type: ignore[attr-defined]
        "last resort": logging.lastResort,
    }


def settings() -> dict[str, Any]:
    """Everything of it, now and in this thread and context."""
    found = {name: read() for name, read in (TORCH_SETTINGS | PROCESS_SETTINGS).items()}
    return {**found, **logging_settings()}


def context() -> dict[Any, Any]:
    """The caller's context variables; those of the event loops themselves come and go."""
    ours = contextvars.copy_context()
    return {var: ours[var] for var in ours if not type(ours[var]).__module__.startswith(("anyio", "trio", "sniffio"))}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before if before[name] != after.get(name)]


@pytest.fixture(autouse=True)
def once_loaded() -> None:
    """Lazy imports, of torch too, happen once in a process and are not what is looked at here."""
    with streamflow.offload(mlp_stack(1)):
        pass


@pytest.fixture
def unusual() -> Iterator[None]:
    """Settings that differ from the defaults, so that falling back to a default would show."""
    dtype = torch.get_default_dtype()
    token = variable.set("mine")
    handler = logging.NullHandler()
    logging.getLogger("streamflow").addHandler(handler)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark = True
    previous = signal.signal(signal.SIGUSR1, lambda *args: None)
    yield
    signal.signal(signal.SIGUSR1, previous)
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(dtype)
    logging.getLogger("streamflow").removeHandler(handler)
    variable.reset(token)


OPTIONS: list[dict[str, Any]] = [{}, {"resident_blocks": "all"}, {"transfer": "staged", "packing_threads": 2}]
with_options = pytest.mark.parametrize("options", OPTIONS, ids=str)


@with_options
async def test_opening_running_and_closing_leave_every_setting_alone(options: dict[str, Any]) -> None:
    model = mlp_stack(3)
    before, variables = settings(), context()
    async with streamflow.open_offload(model, options) as offload:
        assert differences(before, settings()) == []
        assert context() == variables
        await offload.run(run_calls, model, CALLS)
        assert differences(before, settings()) == []
    assert differences(before, settings()) == []
    assert context() == variables


@with_options
async def test_settings_that_are_not_the_defaults_are_left_alone(options: dict[str, Any], unusual: None) -> None:
    model = mlp_stack(3).float()
    before, variables = settings(), context()
    async with streamflow.open_offload(model, options, device=FarCpuDevice()) as offload:
        await offload.run(run_calls, model, [(call[0].float(),) for call in CALLS])
        assert differences(before, settings()) == []
        assert context() == variables
    assert differences(before, settings()) == []
    assert context() == variables


async def test_opening_that_fails_leaves_every_setting_alone() -> None:
    model = mlp_stack(3)
    before, variables = settings(), context()
    with pytest.raises(MemoryError):
        async with streamflow.open_offload(model, device=FarCpuDevice(memory_limit_bytes=1)):
            raise AssertionError("it was opened")
    assert differences(before, settings()) == []
    assert context() == variables


async def test_a_request_that_fails_leaves_every_setting_alone() -> None:
    model = mlp_stack(3)
    before = settings()

    def fail() -> None:
        torch.set_grad_enabled(False)
        raise ValueError("request")

    async with streamflow.open_offload(model) as offload:
        for _ in range(2):
            with pytest.raises(ValueError, match="request"):
                await offload.run(fail)
            assert await offload.run(torch.is_grad_enabled)
    assert differences(before, settings()) == []


async def test_streaming_from_files_leaves_every_setting_alone(tmp_path: Path) -> None:
    """Building on the meta device is for the building thread alone."""
    save_checkpoint(mlp_stack(3), tmp_path)
    before, variables = settings(), context()
    seen: list[list[str]] = []

    def build() -> Any:
        seen.append(differences(before, settings()))
        return mlp_stack(3)

    async with streamflow.open_streamed(build, tmp_path) as (offload, model):
        assert torch.empty(2).device == torch.device("cpu")
        await offload.run(run_calls, model, CALLS)
        assert differences(before, settings()) == []
    assert differences(before, settings()) == []
    assert context() == variables
    assert seen == [[]]


def test_without_a_loop_every_setting_is_left_alone_too() -> None:
    model = mlp_stack(3)
    before, variables = settings(), context()
    handler = signal.getsignal(signal.SIGINT)
    with streamflow.offload(model):
        run_calls(model, CALLS)
        assert differences(before, settings()) == []
        assert signal.getsignal(signal.SIGINT) is handler
    assert differences(before, settings()) == []
    assert context() == variables


async def test_an_offload_that_was_started_leaves_every_setting_alone() -> None:
    model = mlp_stack(3)
    before, variables = settings(), context()
    started = await streamflow.start_offload(model)
    try:
        await started.run(run_calls, model, CALLS)
        assert differences(before, settings()) == []
    finally:
        await started.aclose()
    assert differences(before, settings()) == []
    assert context() == variables


async def test_nothing_is_logged_printed_or_warned(caplog: Any, capfd: Any, recwarn: Any) -> None:
    model = mlp_stack(3)
    with caplog.at_level(logging.DEBUG, "streamflow"):
        async with streamflow.open_offload(model, {"transfer": "staged"}) as offload:
            await offload.run(run_calls, model, CALLS)
    assert [record for record in caplog.records if record.name.startswith("streamflow")] == []
    assert capfd.readouterr() == ("", "")
    assert len(recwarn) == 0


async def test_the_caller_keeps_its_own_thread_limiter() -> None:
    """Threads of streamflow take no token of anyio's default limiter, on which others' work may wait."""
    limiter = anyio.to_thread.current_default_thread_limiter()
    before = limiter.statistics()
    model = mlp_stack(3)
    async with streamflow.open_offload(model, {"transfer": "staged", "packing_threads": 4}) as offload:
        await offload.run(run_calls, model, CALLS)
        assert limiter.statistics() == before
        assert limiter.total_tokens == before.total_tokens
