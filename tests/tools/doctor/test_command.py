"""``streamflow doctor``: what it finds on this machine and on scripted devices, in both its forms."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from streamflow.stages.registration.probe import Verdicts
from streamflow.stages.testing.registrar import ScriptedRegistrar
from streamflow.store.filesystems import Filesystem
from streamflow.tools.cli import main
from streamflow.tools.doctor import examination
from streamflow.weights import registering
from tests.streamflow.devices import RegisteringDevice


def run(*arguments: object) -> str:
    result = CliRunner().invoke(main, ["doctor", *map(str, arguments)])
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


def diagnosis(*arguments: object) -> dict[str, Any]:
    found = json.loads(run("--json", *arguments))
    assert isinstance(found, dict)
    return found


def transfers(found: dict[str, Any]) -> dict[str, str]:
    return {one["source"]: one["transfer"] for one in found["transfers"]}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> RegisteringDevice:
    """A device that registers, in the place of the one that the options name."""
    device = RegisteringDevice()
    monkeypatch.setattr(examination, "make_device", lambda config: device)
    monkeypatch.setattr(registering, "VERDICTS", Verdicts())
    return device


def program(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", f"import os, sys, time\n{code}"]


def test_a_machine_without_an_accelerator_is_well(tmp_path: Path) -> None:
    found = diagnosis("--device", "cpu", "--store-root", tmp_path / "a" / "b")
    assert found["device"]["is_host"]
    assert (found["device"]["link_bytes_per_s"], found["device"]["probed"]) == (None, False)
    assert transfers(found) == dict.fromkeys(("artifact", "checkpoint", "module"), "direct")
    store = found["store"]
    assert (store["root"], store["folder"], store["exists"]) == (str(tmp_path / "a" / "b"), str(tmp_path), False)
    assert store["filesystem"] != "unknown"
    assert found["limits"]["registrable_bytes"] >= found["limits"]["host_available_bytes"] > 0
    assert not (tmp_path / "a").exists()


def test_people_get_the_same(tmp_path: Path) -> None:
    text = " ".join(run("--device", "cpu", "--store-root", tmp_path).split())
    for words in ("registering mapped files no: the device is the host", str(tmp_path), "What would be chosen"):
        assert words in text


def test_a_device_that_registers_is_probed_with_a_file_on_the_stores_filesystem(
    scripted: RegisteringDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    code = "open(%r, 'w').write(repr((os.stat(%r).st_dev, os.stat(%r).st_size)))"
    answer = 'print(\'{"problem": null, "is_conclusive": true}\')'

    def probe_command(registrar: ScriptedRegistrar, path: str, nbytes: int) -> list[str]:
        assert nbytes == registering.PROBE_BYTES
        return program(code % (str(seen), path, path) + "\n" + answer)

    monkeypatch.setattr(ScriptedRegistrar, "probe_command", probe_command)
    before = set(tmp_path.iterdir())
    found = diagnosis("--store-root", tmp_path / "store")
    assert (found["device"]["why_not_registered"], found["device"]["probed"]) == (None, True)
    assert transfers(found) == dict.fromkeys(("artifact", "checkpoint", "module"), "direct")
    assert seen.read_text() == repr((os.stat(tmp_path).st_dev, registering.PROBE_BYTES))
    assert set(tmp_path.iterdir()) - before == {seen}
    assert "works: tried in a child process" in " ".join(run("--store-root", tmp_path / "store").split())


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ({"refusal": "the device does not register read-only host memory"}, "does not register read-only host memory"),
        ({"command": program("time.sleep(1000)")}, "did not answer within 0.5 s"),
        ({"command": program("os.abort()")}, "ended without an answer (signal 6)"),
    ],
    ids=["refuses", "hangs", "dies"],
)
def test_what_stands_against_registering_decides_the_transfer(
    script: dict[str, Any], reason: str, scripted: RegisteringDevice, tmp_path: Path
) -> None:
    for name, value in script.items():
        setattr(scripted.script, name, value)
    deadline_s = 0.5 if "0.5 s" in reason else 60
    found = diagnosis("--store-root", tmp_path, "--probe-deadline-s", deadline_s)
    assert reason in found["device"]["why_not_registered"]
    assert transfers(found) == {"artifact": "staged", "checkpoint": "staged", "module": "direct"}
    assert reason in found["transfers"][0]["reason"]
    assert scripted.script.num_registers == 0


def test_a_folder_that_cannot_hold_a_file_is_said(
    scripted: RegisteringDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**where: str) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    found = diagnosis("--store-root", tmp_path)
    assert "it could not be tried: no file can be made in" in found["device"]["why_not_registered"]
    assert "Read-only file system" in found["device"]["why_not_registered"]


def test_a_store_on_a_network_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    network = Filesystem("nfs4", "/net")
    monkeypatch.setattr(examination, "filesystem_of", lambda fd: network)
    monkeypatch.setattr("streamflow.store.filesystems.filesystem_of", lambda fd: network)
    store = diagnosis("--device", "cpu", "--store-root", tmp_path)["store"]
    assert (store["filesystem"], store["mount_point"]) == ("nfs4", "/net")
    assert "nfs4" in store["problem"]


def test_options_that_do_not_fit_are_a_clear_message() -> None:
    result = CliRunner().invoke(main, ["doctor", "--device", "cuda:99", "--probe-deadline-s", "0"])
    assert result.exit_code == 2
    assert "probe_deadline_s is 0.0 but must be positive" in result.stderr
    assert "device cuda:99 is not there" in result.stderr
