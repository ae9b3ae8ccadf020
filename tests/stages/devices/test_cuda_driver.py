"""The probe's own program: what it asks of the driver and makes of the answers. A script stands for the driver."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from streamflow.stages.devices import cuda_driver
from streamflow.stages.devices.cuda_driver import (
    COMPUTE_MODE,
    READ_ONLY_HOST_REGISTER_SUPPORTED,
    CudaDriver,
    main,
    probe,
    probe_command,
    why_not_mappings,
)


@attrs.define(eq=False)
class FakeLibrary:
    """The driver's functions: ``codes`` says what they return, ``attributes`` what the device is like."""

    codes: dict[str, int] = attrs.field(factory=dict)
    attributes: dict[int, int] = attrs.field(factory=lambda: {COMPUTE_MODE: 0, READ_ONLY_HOST_REGISTER_SUPPORTED: 1})
    calls: list[tuple[str, Any]] = attrs.field(factory=list)

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            if name == "cuGetErrorName":
                arguments[1]._obj.value = f"CUDA_ERROR_{arguments[0]}".encode()
            elif name == "cuDeviceGet":
                arguments[0]._obj.value = 40 + arguments[1]
            elif name == "cuDeviceGetAttribute":
                assert arguments[2].value == 42
                arguments[0]._obj.value = self.attributes[arguments[1]]
            elif name == "cuMemHostRegister_v2":
                self.calls.append(("first byte", ctypes.string_at(arguments[0].value, 1)))
            return self.codes.get(name, 0)

        return call

    def named(self, *names: str) -> list[str]:
        return [name for name, _ in self.calls if name in names]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    fake, real = FakeLibrary(), ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name, **options: real(name, **options) if name is None else fake)
    return fake


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "weights"
    path.write_bytes(b"w" * 10_000)
    return str(path)


def probed(file: str) -> tuple[Any, Any]:
    answer = probe(CudaDriver(), file, 8192, ordinal=2)
    return answer["problem"], answer["is_conclusive"]


def test_a_range_of_the_file_is_registered_read_only_and_given_back(library: FakeLibrary, file: str) -> None:
    assert probed(file) == (None, True)
    calls = ("cuInit", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuMemHostRegister_v2", "cuMemHostUnregister")
    assert library.named(*calls) == list(calls)
    (register,) = [arguments for name, arguments in library.calls if name == "cuMemHostRegister_v2"]
    assert (register[1].value, register[2]) == (8192, 8)
    assert ("first byte", b"w") in library.calls


def test_a_refusal_is_conclusive_and_named(library: FakeLibrary, file: str) -> None:
    library.codes["cuMemHostRegister_v2"] = 801
    assert probed(file) == ("cuMemHostRegister_v2 returned CUDA_ERROR_801 (801)", True)
    assert library.named("cuMemHostUnregister") == []


def test_exclusive_mode_is_inconclusive_and_no_context_is_tried(library: FakeLibrary, file: str) -> None:
    library.attributes[COMPUTE_MODE] = 3
    problem, is_conclusive = probed(file)
    assert "exclusive compute mode" in problem
    assert not is_conclusive
    assert library.named("cuDevicePrimaryCtxRetain") == []


@pytest.mark.parametrize(("code", "is_conclusive"), [(2, False), (46, False), (999, True)])
def test_a_device_that_no_second_process_can_use_says_nothing_about_registration(
    library: FakeLibrary, file: str, code: int, is_conclusive: bool
) -> None:
    library.codes["cuDevicePrimaryCtxRetain"] = code
    assert probed(file) == (
        f"no second process can use the device: cuDevicePrimaryCtxRetain returned CUDA_ERROR_{code} ({code})",
        is_conclusive,
    )


def test_a_file_that_cannot_be_mapped_is_an_os_error(library: FakeLibrary, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        probed(str(tmp_path / "gone"))
    with pytest.raises(OSError, match="No such device"):
        cuda_driver._map("/dev/null", 4096)


@pytest.mark.parametrize(
    ("supported", "reason"), [(1, None), (0, "the device does not register read-only host memory")]
)
def test_the_devices_ability_is_read(library: FakeLibrary, supported: int, reason: str | None) -> None:
    library.attributes[READ_ONLY_HOST_REGISTER_SUPPORTED] = supported
    assert why_not_mappings(2) == reason


def test_a_driver_that_cannot_be_asked_is_a_reason(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    library.codes["cuInit"] = 100
    assert why_not_mappings(0) == (
        "the CUDA driver cannot be asked whether it registers read-only memory: cuInit returned CUDA_ERROR_100 (100)"
    )

    def no_driver(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_driver)
    assert "libcuda.so.1: cannot open" in (why_not_mappings(0) or "")


def test_the_program_prints_one_line_and_ends_at_once(
    library: FakeLibrary, file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    main([file, "4096", "2"])
    library.codes["cuInit"] = 3
    main([file, "4096", "2"])
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"problem": None, "is_conclusive": True}
    assert second == {"problem": "cuInit returned CUDA_ERROR_3 (3)", "is_conclusive": True}
    assert ended == [0, 0]


def test_the_program_itself_answers_with_and_without_a_device(file: str) -> None:
    run = subprocess.run(probe_command(file, 4096, 0), capture_output=True, text=True, timeout=60, check=True)
    assert (json.loads(run.stdout)["problem"] is None) == torch.cuda.is_available()
    assert run.stderr == ""


def test_the_program_needs_neither_torch_nor_this_package(file: str) -> None:
    command = probe_command(file, 4096, 0)
    code = f"import runpy, sys; sys.argv = {command[3:]!r}; import os; os._exit = lambda code: None; " + (
        f"runpy.run_path({command[3]!r}, run_name='__main__'); "
        "print([name for name in sys.modules if name.partition('.')[0] in ('torch', 'streamflow', 'anyio', 'attrs')])"
    )
    run = subprocess.run(
        [sys.executable, *command[1:3], "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.splitlines()[-1] == "[]"
