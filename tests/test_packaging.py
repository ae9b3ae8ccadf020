"""What the package says of itself agrees: version, requirements, pins, type marker."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import sysconfig
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import streamflow
from streamflow._version import __version__

#: Where the environment's own packages are: other folders come on the path when libraries that vendor some are used.
SITE = [sysconfig.get_path("purelib")]
ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = {
    canonicalize_name(name): Version(version)
    for name, _, version in (
        line.partition("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    )
}
DECLARED = [
    requirement
    for line in [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]
    if (requirement := Requirement(line)).name != PROJECT["name"]
]


def test_the_version_is_written_down_once() -> None:
    assert importlib.metadata.version("streamflow-offload") == __version__
    assert PROJECT["dynamic"] == ["version"]


def test_the_installed_types_are_found() -> None:
    assert (Path(streamflow.__path__[0]) / "py.typed").is_file()


@pytest.mark.parametrize("requirement", DECLARED, ids=str)
def test_a_requirement_is_pinned_within_its_range(requirement: Requirement) -> None:
    assert PINS[canonicalize_name(requirement.name)] in requirement.specifier


def test_torch_has_no_upper_bound() -> None:
    (torch,) = [requirement for requirement in DECLARED if requirement.name == "torch"]
    assert str(torch.specifier) == ">=2.6"


def test_what_is_tested_is_what_is_pinned() -> None:
    """Every pinned distribution is installed in the pinned version, if at all, and every declared one is there."""
    installed = {canonicalize_name(d.name): Version(d.version) for d in importlib.metadata.distributions(path=SITE)}
    assert {canonicalize_name(requirement.name) for requirement in DECLARED} <= installed.keys()
    differ = {
        name: f"pinned {PINS[name]}, installed {version}"
        for name, version in installed.items()
        if name in PINS and version.public != PINS[name].public
    }
    assert not differ


def test_the_module_runs_as_the_command_does(tmp_path: Path) -> None:
    for command in ([sys.executable, "-m", "streamflow"], [str(Path(sys.executable).with_name("streamflow"))]):
        run = subprocess.run([*command, "--version"], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert re.search(rf"\b{re.escape(__version__)}\b", run.stdout), command


def test_importing_the_entry_point_imports_nothing_else(tmp_path: Path) -> None:
    code = "import sys, streamflow.__main__; assert 'streamflow.tools' not in sys.modules; print('ran')"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout == "ran\n"
