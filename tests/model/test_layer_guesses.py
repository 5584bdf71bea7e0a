"""Inputs that are guessed from a model's first layer."""

import pytest
import torch
from torch import nn

from tensorshard.model.sample_inputs import example_inputs


class Patches(nn.Module):
    """A classifier of images whose first layer takes the numbers of a patch, with a table of positions."""

    def __init__(self, channels: int, patch: int, side: int, extra: int = 0, *, registered: bool = True) -> None:
        super().__init__()
        self.patch, self.extra = patch, extra
        self.embed, self.head = nn.Linear(channels * patch * patch, 8), nn.Linear(8, 2)
        table = torch.zeros(side * side + extra, 8)
        if registered:
            self.register_buffer("table", table[None])
        else:
            self.table = table

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        samples, _, height, width = image.shape
        if height != width:
            raise ValueError("the image is not square")
        patches = nn.functional.unfold(image, self.patch, stride=self.patch).transpose(1, 2)
        tokens = torch.cat([torch.zeros(samples, self.extra, 8), self.embed(patches)], 1)
        return self.head((tokens + self.table).mean(1))


def _runs(model: nn.Module) -> torch.Tensor:
    for inputs in example_inputs(model):
        try:
            return (
                model(**inputs)
                if isinstance(inputs, dict)
                else model(*inputs if isinstance(inputs, tuple) else [inputs])
            )
        except (RuntimeError, TypeError, ValueError, IndexError):
            continue
    raise AssertionError("no guess runs")


@pytest.mark.parametrize("extra", [0, 1, 5])
@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize(("channels", "patch", "side"), [(3, 8, 4), (1, 4, 3), (3, 16, 14), (1, 7, 5)])
def test_a_linear_layer_may_take_the_patches_of_an_image(channels, patch, side, extra, registered):
    assert _runs(Patches(channels, patch, side, extra, registered=registered)).shape == (2, 2)


def test_a_linear_layer_takes_features_first():
    guesses = example_inputs(nn.Linear(192, 5))
    assert guesses[0].shape == (2, 192)


class Denoiser(nn.Module):
    """A convolution of `dimensions`, and a time."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
        self.first, self.time, self.last = convolution(4, 8, 3), nn.Linear(1, 8), convolution(8, 4, 3)

    def forward(self, noised: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        moved = self.time(time.to(torch.float32).view(-1, 1))
        return self.last(self.first(noised) + moved.view(*moved.shape, *[1] * (noised.ndim - 2)))


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_convolution_takes_images_beside_other_arguments(dimensions):
    assert _runs(Denoiser(dimensions)).shape[:2] == (2, 4)
