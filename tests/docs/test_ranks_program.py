"""The program on the page on ranks, run as the page says: by torchrun, on one node and on two (of this machine)."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.docs.blocks import DOCS, ROOT, blocks_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

PROMPTS = ["a red fox", "a blue bird", "a green frog", "an owl", "a hare"]

#: Stands for the package in a folder of the program's own: importing the real one takes longer than all the rest.
TOY_DIFFUSERS = """
from types import SimpleNamespace
from zlib import crc32

import torch.distributed as dist

from tests.streamflow.pipelines.toys import ToyPipeline, toy_pipeline


class Picture(SimpleNamespace):
    def save(self, path):
        with open(path, "w") as file:
            file.write(f"{dist.get_rank()} {float(self.pixels.sum())}")


class DiffusionPipeline(ToyPipeline):
    @classmethod
    def from_pretrained(cls, name, dtype):
        return cls(**toy_pipeline().components)

    def __call__(self, prompt, num_inference_steps):
        self.components.pop("transformer_2", None)
        pixels = super().__call__([len(prompt) % 8, 1], num_steps=num_inference_steps, seed=crc32(prompt.encode()))
        return SimpleNamespace(images=[Picture(pixels=pixels)])
"""


def page_commands() -> list[list[str]]:
    """What the page starts torchrun with, up to the program."""
    lines = re.findall(r"^torchrun (.*)", (DOCS / "ranks.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [shlex.split(line.partition("pictures.py")[0]) for line in lines]


def start(folder: Path, arguments: Sequence[str], prompts: Sequence[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *arguments, "pictures.py", *prompts]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(jobs: Sequence[subprocess.Popen[str]]) -> None:
    """Wait for all, and fail with what they said if one failed."""
    try:
        said = [job.communicate(timeout=150)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert [job.returncode for job in jobs] == [0] * len(jobs), "\n".join(said)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the page's program, for a toy pipeline."""
    (program,) = [block for block in blocks_of("ranks.md") if block.title == "pictures.py"]
    (tmp_path / "pictures.py").write_text(program.code, encoding="utf-8")
    (tmp_path / "diffusers.py").write_text(TOY_DIFFUSERS, encoding="utf-8")
    return tmp_path


def pictures(folder: Path) -> dict[int, list[str]]:
    """The rank that made each picture, and what is on it."""
    return {int(path.stem): path.read_text(encoding="utf-8").split() for path in folder.glob("*.png")}


def test_two_ranks_of_one_node_make_the_pictures_of_all_prompts(folder: Path) -> None:
    arguments = ["2" if word == "8" else word for word in page_commands()[0]]
    finish([start(folder, arguments, PROMPTS[:3])])
    made = pictures(folder)
    assert {number: int(rank) for number, (rank, _) in made.items()} == {0: 0, 1: 1, 2: 0}
    assert len({pixels for _, pixels in made.values()}) == 3


def test_two_nodes_gather_inside_of_each(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    changes = {"8": "2", "node-a:29400": endpoint}
    arguments = [changes.get(word, word) for word in page_commands()[1]]
    assert endpoint in arguments
    finish([start(folder, [*arguments, "--local-addr", "127.0.0.1"], PROMPTS) for _ in range(2)])
    made = pictures(folder)
    assert {number: int(rank) for number, (rank, _) in made.items()} == {0: 0, 1: 1, 2: 2, 3: 3, 4: 0}
    assert len({pixels for _, pixels in made.values()}) == len(PROMPTS)
