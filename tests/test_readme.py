"""The example in the README runs as it stands, streams, and says so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def run_as_a_program(code: str, folder: Path) -> str:
    """What ``code`` printed, run as a program of its own that must end well and warn of nothing."""
    program = folder / "example.py"
    program.write_text(code, encoding="utf-8")
    command = [sys.executable, "-W", "error", str(program)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"the example failed:\n{done.stderr}"
    return done.stdout


def test_the_library_example_runs_and_streams(tmp_path: Path) -> None:
    (example,) = BLOCKS
    printed = run_as_a_program(example, tmp_path)
    said = re.fullmatch(r"equal: (True|False), streamed: ([\d,]+) bytes\n", printed)
    assert said, f"the example printed something else: {printed!r}"
    assert said[1] == "True"
    assert int(said[2].replace(",", "")) > 0


def test_the_readme_is_short_and_shows_the_two_commands() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    assert {"make demo", "make test"} <= {line.split("#")[0].strip() for line in lines}


def test_every_link_leads_to_a_file() -> None:
    targets = [target for target in re.findall(r"\]\(([^)#]+)", README) if "://" not in target]
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
