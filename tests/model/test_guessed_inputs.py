"""Inputs that are guessed from a model's first layer and from its forward's arguments."""

import pytest
import torch
from torch import nn

from tensorshard.model.sample_inputs import example_inputs, guesses_by_arguments


class Recommender(nn.Module):
    """Numbers, and a row of one table for each of four fields."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.table = nn.Linear(8, 1), nn.Embedding(50, 16)
        self.deep = nn.Sequential(nn.Linear(8 + 4 * 16, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        return self.wide(dense) + self.deep(torch.cat([dense, self.table(sparse).flatten(1)], 1))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(20, 8), nn.Linear(8, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.bag(words))


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.up, self.down = nn.Embedding(10, 24), nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(sample) + self.time(timestep)))


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(12, 24), nn.Linear(24, 5)

    def forward(self, nodes: torch.Tensor, adjacency: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(adjacency @ self.mix(nodes))) * mask[..., None]


class Coupled(nn.Module):
    """A half of the features decides what becomes of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, 1)
        return torch.cat([left, right * self.scale(left)], 1)


def _flat() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Flatten(), nn.Linear(4 * 9, 5))


MODELS = {
    "fields": Recommender,
    "bags": Bags,
    "times": Denoiser,
    "graph": Graph,
    "halves": Coupled,
    "steps at once": _flat,
}


@pytest.mark.parametrize("kind", MODELS)
def test_one_of_them_runs(kind):
    model = MODELS[kind]()
    outputs = []
    for inputs in example_inputs(model):
        try:
            outputs.append(model(**inputs) if isinstance(inputs, dict) else model(inputs))
        except (IndexError, RuntimeError, TypeError, ValueError):
            continue
        break
    assert len(outputs) == 1 and len(outputs[0]) == 2


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 4) for width in (3, 5, 7))

    def forward(self, a, b, c, d, optional=None):
        return self.layers[0](a) + self.layers[1](b) + self.layers[2](c) + d


def test_there_are_not_too_many():
    found = guesses_by_arguments(Many())
    assert 10 < len(found) < 50
    assert all(list(guess) == ["a", "b", "c", "d"] for guess in found)


def test_a_forward_of_many_arguments_takes_no_longer():
    class Wide(Many):
        def forward(self, a, b, c, d, e, f, g, h, i, j):
            return a

    found = guesses_by_arguments(Wide())
    assert len(found) == 48
    first = {name: value.shape for name, value in found[0].items()}
    differing = [sum(guess[name].shape != shape for name, shape in first.items()) for guess in found]
    assert differing[0] == 0 and set(differing[1:11]) == {1} and max(differing) == 2


def test_a_forward_that_takes_anything_gets_no_guess():
    class Open(nn.Module):
        def forward(self, *args, **kwargs):
            return args

    assert guesses_by_arguments(Open()) == []


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


class LinearDenoiser(nn.Module):
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
    assert _runs(LinearDenoiser(dimensions)).shape[:2] == (2, 4)
