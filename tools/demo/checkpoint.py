"""The checkpoint on disk: all weights as float32 in ``digits.safetensors``, sizes and origin in ``digits.json``.

The package ships one under ``data/``; ``streamflow.tools.demo.train`` writes others of the same form.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from streamflow.tools.demo.errors import DemoCheckpointError
from streamflow.tools.demo.model import DigitTransformer, DigitTransformerConfig

WEIGHTS_NAME = "digits.safetensors"
DESCRIPTION_NAME = "digits.json"


@attrs.frozen
class CheckpointDescription:
    """What ``digits.json`` holds: the model's sizes, and how it was trained (any JSON values, for people and tests)."""

    config: DigitTransformerConfig
    training: dict[str, Any]


def demo_checkpoint_dir() -> Path:
    """The folder of the checkpoint that ships with the package, in a source tree or an installed wheel.

    :raises DemoCheckpointError: if the weights are not there.
    """
    directory = Path(str(resources.files("streamflow.tools.demo") / "data"))
    if not (directory / WEIGHTS_NAME).is_file():
        raise DemoCheckpointError(directory / WEIGHTS_NAME, "the package's data file is missing")
    return directory


def load_demo_model(directory: Path | None = None) -> DigitTransformer:
    """The trained model on the CPU, in float32 and in eval mode, its weights in memory of its own.

    :param directory: where a checkpoint lies; None for the one that ships with the package.
    :raises DemoCheckpointError: if a file is missing or damaged, or the two do not fit together.
    """
    directory = directory or demo_checkpoint_dir()
    model = build_empty_model(read_description(directory).config).to_empty(device="cpu")
    path = directory / WEIGHTS_NAME
    try:
        model.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise DemoCheckpointError(path, f"the weights cannot be loaded ({error})") from error
    return model


def build_empty_model(config: DigitTransformerConfig) -> DigitTransformer:
    """The model in eval mode on the meta device: shapes without weights. Leaves torch's random state as it was."""
    with torch.device("meta"):
        return DigitTransformer(config).eval()


def read_description(directory: Path) -> CheckpointDescription:
    """What the checkpoint in ``directory`` says of itself.

    :raises DemoCheckpointError: if the file is missing, is not JSON, or has fields other than those expected.
    """
    path = directory / DESCRIPTION_NAME
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return CheckpointDescription(**{**fields, "config": DigitTransformerConfig(**fields["config"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DemoCheckpointError(path, f"the description cannot be read ({error})") from error


def save_checkpoint(model: DigitTransformer, training: dict[str, Any], directory: Path) -> None:
    """Writes both files into ``directory``, which is made if need be; files of an earlier checkpoint are replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().float().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, directory / WEIGHTS_NAME)
    description = attrs.asdict(CheckpointDescription(model.config, training))
    (directory / DESCRIPTION_NAME).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
