"""Digits as a picture."""

from __future__ import annotations

import io

import pytest
import torch
from PIL import Image

from streamflow.tools.demo.errors import DemoValueError
from streamflow.tools.demo.picture import draw_grid


def test_images_are_laid_out_in_rows_dark_on_white() -> None:
    images = torch.stack([torch.full((1, 8, 8), value) for value in (1.0, -1.0, 0.0)])
    picture = draw_grid(images, num_columns=2, scale=3, margin=4)
    assert picture.mode == "L"
    assert picture.size == (2 * (24 + 4) + 4, 2 * (24 + 4) + 4)
    centres = [picture.getpixel((4 + 12 + 28 * column, 4 + 12 + 28 * row)) for row in (0, 1) for column in (0, 1)]
    assert centres == [0, 255, 128, 255]
    assert {picture.getpixel((position, 2)) for position in range(60)} == {255}


def test_an_image_keeps_its_orientation() -> None:
    image = torch.full((1, 1, 8, 8), -1.0)
    image[0, 0, 1, 6] = 1.0
    picture = draw_grid(image, num_columns=1, scale=1, margin=0)
    assert [(x, y) for y in range(8) for x in range(8) if picture.getpixel((x, y)) == 0] == [(6, 1)]


def test_it_can_be_saved_as_png() -> None:
    file = io.BytesIO()
    picture = draw_grid(torch.rand(3, 1, 8, 8))
    picture.save(file, "PNG")
    with Image.open(file) as read:
        assert read.size == picture.size
        assert read.tobytes() == picture.tobytes()


@pytest.mark.parametrize("images", [torch.zeros(0, 1, 8, 8), torch.zeros(2, 3, 8, 8), torch.zeros(8, 8)])
def test_what_is_no_batch_of_grey_images_is_refused(images: torch.Tensor) -> None:
    with pytest.raises(DemoValueError, match="shape of images"):
        draw_grid(images)


@pytest.mark.parametrize(("name", "value"), [("num_columns", 0), ("scale", 0), ("margin", -1)])
def test_numbers_out_of_range_are_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(DemoValueError, match=name):
        draw_grid(torch.zeros(1, 1, 8, 8), **{name: value})
