"""Digits as a picture that a person can look at."""

from __future__ import annotations

from collections.abc import Iterator

from PIL import Image
from torch import Tensor

from streamflow.tools.demo.errors import DemoValueError

PAPER = 255


def draw_grid(images: Tensor, *, num_columns: int = 10, scale: int = 8, margin: int = 6) -> Image.Image:
    """A grey picture of ``images`` in rows, dark ink on white paper; save it as PNG with its ``save``.

    :param images: float[N, 1, H, W] in [-1, 1] on any device, 1 for ink.
    :param num_columns: images per row.
    :param scale: how many times larger than its pixels each image is drawn, smoothed.
    :param margin: pixels of paper around each image.
    :raises DemoValueError: if there is no image, or a number is out of range.
    """
    for name, value, least in (("num_columns", num_columns, 1), ("scale", scale, 1), ("margin", margin, 0)):
        if value < least:
            raise DemoValueError(name, value, f"at least {least}")
    if images.ndim != 4 or images.shape[1] != 1 or images.numel() == 0:
        raise DemoValueError("the shape of images", tuple(images.shape), "[N, 1, H, W], with an image in it")
    num_rows = -(-len(images) // num_columns)
    step_x, step_y = (size * scale + margin for size in (images.shape[3], images.shape[2]))
    picture = Image.new("L", (num_columns * step_x + margin, num_rows * step_y + margin), PAPER)
    for index, tile in enumerate(_draw_tiles(images, scale)):
        row, column = divmod(index, num_columns)
        picture.paste(tile, (margin + column * step_x, margin + row * step_y))
    return picture


def _draw_tiles(images: Tensor, scale: int) -> Iterator[Image.Image]:
    size = (images.shape[3], images.shape[2])
    grey = ((1 - images.detach().float().cpu()) / 2 * PAPER).round().clamp(0, PAPER)
    for image in grey:
        tile = Image.frombytes("L", size, bytes(int(value) for value in image.flatten().tolist()))
        yield tile.resize((size[0] * scale, size[1] * scale), Image.Resampling.BICUBIC)
